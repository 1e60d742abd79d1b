"""Routes of sessions and their turns: create, read and end."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, StrictBool, model_validator

from proxy.auth import Principal
from proxy.routes.control import (
    Body,
    Caller,
    CheckedRoute,
    Count,
    Here,
    Id,
    Number,
    RewardValue,
    Text,
    answer,
    describe_answer,
    page,
    record_json,
    session_json,
    turn_json,
)
from proxy.services import Services
from proxy.sessions.identities import SESSION_ID, check_has_policy, check_id
from turnwise.store import policies, sessions, statements, turns
from turnwise.store.database import Connection
from turnwise.types import Credit, Json, Reward, Session, SessionStatus, Split

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])

Prompt = Annotated[
    Literal["added", "whole"],
    Query(
        description="Whether `messages`, `tools` and `prompt_token_ids` are the turn's own part or the whole prompt."
    ),
]


GAMMA_UNUSED = (
    "`gamma` discounts step rewards and has no effect with credit `propagate`; give credit `step_wise`, or leave "
    "`gamma` out"
)


class NewSession(Body):
    """The fields of a new session; all have defaults."""

    session_id: Annotated[str, Field(pattern=SESSION_ID)] | None = None
    task_id: Id | None = None
    run: Count = 0
    group_id: Id | None = None
    group_size: Annotated[Count, Field(ge=1, le=100_000)] | None = None
    split: Split = Split.TRAIN
    credit: Credit = Credit.PROPAGATE
    gamma: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    metadata: dict[str, Any] = Field(default_factory=dict)
    policy: Text | None = None
    """Name of its own policy, by default the key's: it samples the calls that name no other, and cannot change."""
    user_id: Id | None = None
    """The person or account that the agent serves; `turnwise forget --user-id` deletes its sessions."""
    train: StrictBool = True
    """False: nothing of it is ever trained, exported, judged or replayed."""
    record: StrictBool = True
    """False: nor is anything stored that is said in it."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Sampling parameters that override those of the session's calls, and pins of the proxy."""
    key_may: Literal["call", "call_and_reward"] = "call"
    """Role of the session key in the answer: call the model, or also post rewards for its session and end it."""
    key_expires_seconds: Annotated[int, Field(strict=True, ge=1, le=10**9)] | None = None
    """Lifetime of the session key; by default it is valid while the session exists and the creating key is valid."""

    @model_validator(mode="after")
    def _gamma_has_an_effect(self) -> NewSession:
        if self.gamma and self.credit is Credit.PROPAGATE:
            raise ValueError(GAMMA_UNUSED)
        if not self.record:
            self.train = False
        return self


OF_FEATURES = frozenset({"sampling", "record"})
"""Fields of a new session that have an effect only where a feature serves them."""


def check_fields(wanted: NewSession, services: Services) -> None:
    """Check what is wanted of features.

    Raises:
        RequestValidationError: none serves a field, which is then as unknown as any other; or one refuses its value.
    """
    for name in sorted(wanted.model_fields_set & OF_FEATURES):
        error = {"type": "extra_forbidden", "loc": ("body", name), "msg": "no such field"}
        if name in services.steps.session_fields:
            try:
                services.steps.session_fields[name](getattr(wanted, name))
                continue
            except ValueError as refused:
                error |= {"type": "value_error", "msg": str(refused)}
        raise RequestValidationError([error])


class EndRequest(Body):
    """How a session ended."""

    termination_reason: Text | None = None
    reward: RewardValue | None = None
    """A last reward for the whole session, written in the same transaction."""


@router.post("/sessions", responses=describe_answer("NewSessionAnswer"))
async def create_session(wanted: NewSession, request: Request, services: Here, principal: Caller) -> Response:
    """Create a session, or change the session with this id; a field that can no longer change gets 409.

    Fields that are left out do not change. All fields of an open session can change until its group is complete; of a
    session that is over, only `metadata` and `user_id` can change.
    """
    check_fields(wanted, services)
    fields = wanted.model_dump(exclude={"key_may", "key_expires_seconds", "policy"})
    session_id = check_id(fields.pop("session_id") or f"session-{uuid.uuid4().hex}")
    policy_id = principal.policy_id
    if wanted.policy is not None:
        named = await services.database.fetch(policies.find_policy, principal.tenant, wanted.policy)
        policy_id = named.policy_id
    services.pool.check_in_use(policy_id)
    of: Json = {"tenant": principal.tenant, "policy_id": policy_id, "key_id": principal.root_key_id, "opened_by": "api"}
    fields["metadata"] = services.stored_document(wanted.metadata)
    session = Session(session_id=session_id, **of, **fields)
    stored = await services.sessions.cache.create(session)
    for rule in services.reopened:
        stored = await rule(session, stored)
    if wanted.policy is not None:
        check_has_policy(stored, policy_id, wanted.policy, param="policy")
    given = {name for name in wanted.model_fields_set & fields.keys() if fields[name] is not None}
    if stored.status is SessionStatus.OPEN:
        given.add("opened_by")
    if any(getattr(stored, name) != getattr(session, name) for name in given):
        stored = await services.writer.do(sessions.change_session, session, given)
        services.forget_session(principal.tenant, session_id)
    return answer(await new_session_json(stored, wanted, request, services, principal))


async def new_session_json(
    session: Session, wanted: NewSession, request: Request, services: Services, principal: Principal
) -> Json:
    origin = services.settings.public_url or str(request.base_url)
    expires_at = None if wanted.key_expires_seconds is None else int(time.time()) + wanted.key_expires_seconds
    return {
        **await session_json(session, services),
        "base_url": f"{origin.rstrip('/')}/sessions/{session.session_id}/v1",
        "api_key": services.authenticator.session_key(
            session, principal, may_reward=wanted.key_may == "call_and_reward", expires_at=expires_at
        ),
    }


@router.get("/sessions/{session_id}", responses=describe_answer("ReadSession"))
async def get_session(session_id: Id, services: Here, principal: Caller) -> Response:
    """Read one session, with the rewards that were given for all of it."""
    session, lines = await services.database.fetch(sessions.read_session_with_rewards, principal.tenant, session_id)
    return answer({**await session_json(session, services), "rewards": [record_json(line) for line in lines]})


@router.get("/sessions/{session_id}/turns", responses=describe_answer("TurnPage"))
async def list_turns(
    session_id: Id,
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Id | None = None,
    prompt: Prompt = "added",
) -> Response:
    """List a session's turns in the order of their commits, each with the part that it adds to its parent's prompt.

    `prompt=whole` returns each turn's whole prompt: the size grows with the square of a conversation's length. A page
    of several turns ends at about 8 MiB, also before `limit`: `has_more` is true then.
    """

    def read(connection: Connection) -> Response:
        whole, size = prompt == "whole", statements.PAGE_BYTES
        views, more = turns.read_turns(
            connection, principal.tenant, session_id, limit=limit, after=after, whole_prompt=whole, max_bytes=size
        )
        return page(_turns_json(connection, views, services), has_more=more)

    return await services.database.fetch(read)


@router.get("/turns/{turn_id}", responses=describe_answer("TurnAnswer"))
async def get_turn(turn_id: Id, services: Here, principal: Caller, prompt: Prompt = "added") -> Response:
    """Read one turn with the part that it adds to its parent's prompt; `prompt=whole` returns the whole prompt."""

    def read(connection: Connection) -> Json:
        view = turns.read_turn(connection, principal.tenant, turn_id, whole_prompt=prompt == "whole")
        return _turns_json(connection, [view], services)[0]

    return answer(await services.database.fetch(read))


def _turns_json(connection: Connection, views: Sequence[turns.TurnView], services: Services) -> list[Json]:
    names, shown = policies.names_of_policies(connection), [turn_json(view) for view in views]
    for row, view in zip(shown, views, strict=True):
        for add in services.turn_fields:
            row |= add(view.turn)
        row["policy"] = names.get(view.turn.policy_id)
    return shown


FIXED_REASON = re.compile(r"exit_status_-?\d{1,3}|timeout|error|interrupted")
"""What a rollout writes, and reads when it is resumed; any other reason is free text."""


@router.post("/sessions/{session_id}/end", responses=describe_answer("EndedSessionAnswer"))
async def end_session(session_id: Id, services: Here, principal: Caller, ending: EndRequest | None = None) -> Response:
    """End a session; `training_note` in the answer says what it waits for until it is trained, or why it is not."""
    given, reward = ending or EndRequest(), None
    if given.reward is not None:
        reward = Reward(session_id=session_id, tenant=principal.tenant, value=given.reward, written_by=principal.key_id)
    reason = given.termination_reason
    if reason is not None and not FIXED_REASON.fullmatch(reason):
        reason = services.stored_text(reason)
    session = await services.writer.do(sessions.end_session, principal.tenant, session_id, reason, reward=reward)
    services.forget_session(principal.tenant, session_id)
    services.metrics.sessions.labels("ended").inc()
    shown = await session_json(session, services)
    for add in services.ended:
        shown |= await add(session)
    return answer(shown)
