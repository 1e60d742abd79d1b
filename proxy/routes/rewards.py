"""Routes that write rewards and read experiences."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Generator
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from proxy.auth import Principal
from proxy.http.asgi import Receive, Scope, Send
from proxy.routes.limits import Count, Id, LabelName, LimitedRoute, Number, Text
from proxy.routes.models import RewardsAnswer, answer, describe_answer
from proxy.routes.serialise import caller, experience_json
from proxy.services import Services, services_of
from turnwise.errors import InvalidRequest
from turnwise.store import experiences, ledger, queries, trained
from turnwise.types import TRAINED_ROLES, Credit, Reward, Role, SessionStatus, Split

router = APIRouter(prefix="/v1", route_class=LimitedRoute, tags=["rewards"])

Here = Annotated[Services, Depends(services_of)]
Caller = Annotated[Principal, Depends(caller)]


class RewardLine(BaseModel):
    """One reward: for a turn, a step of a session, or a whole session."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    session_id: Id | None = None
    turn_id: Id | None = None
    step: Count | None = None
    value: Number
    name: Id = "reward"
    source: Text | None = None

    @model_validator(mode="after")
    def _one_target(self) -> RewardLine:
        if self.turn_id is None and self.session_id is None:
            raise ValueError("give `turn_id`, or `session_id` with or without `step`")
        if self.turn_id is not None and self.step is not None:
            raise ValueError("give `turn_id` or `step`, not both")
        return self


def _as_list(lines: object) -> object:
    return lines if isinstance(lines, list) else [lines]


RewardLines = Annotated[
    list[RewardLine],
    Field(min_length=1, max_length=10_000),
    BeforeValidator(_as_list, json_schema_input_type=RewardLine | list[RewardLine]),
]
"""One line or many."""


class Export(StreamingResponse):
    """Streams lines from an open transaction, and ends the transaction even if the client disconnects early."""

    def __init__(self, first: bytes, lines: Generator[bytes]) -> None:
        self._lines = lines
        super().__init__(itertools.chain((first,), lines), media_type="application/jsonl")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.to_thread(self._lines.close)


@router.post("/rewards", responses=describe_answer(RewardsAnswer))
async def post_rewards(
    wanted: RewardLines,
    request: Request,
    services: Here,
    principal: Caller,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=256)] = None,
) -> Response:
    """Append all reward lines or none; a later line with the same target and name replaces an earlier one."""
    for line in wanted:
        if line.session_id is not None:
            principal.require_session(line.session_id)
    rewards = [
        Reward(
            # A session key may only reward turns of its own session.
            session_id=line.session_id or principal.session_id or "",
            tenant=principal.tenant,
            turn_id=line.turn_id,
            step=line.step,
            value=line.value,
            name=line.name,
            source=line.source,
            written_by=principal.key_id,
        )
        for line in wanted
    ]
    digest = hashlib.blake2b(await request.body(), digest_size=16).digest()
    reached = await services.writer.do(
        ledger.add_rewards,
        rewards,
        idempotency_key=idempotency_key,
        body_digest=digest,
        retrain=services.settings.retrain_revised,
    )
    for line in wanted:
        services.metrics.rewards.labels(
            "turn" if line.turn_id else "step" if line.step is not None else "session"
        ).inc()
    updates = await asyncio.to_thread(_last_updates, services, principal.tenant, rewards)
    rows = [{"turns": count, "trained_in": update} for count, update in zip(reached, updates, strict=True)]
    return answer({"object": "list", "data": rows})


def _last_updates(services: Services, tenant: str, lines: list[Reward]) -> list[int | None]:
    """Return the last update that trained each line's session."""
    with services.database.read() as connection:
        of_turns = queries.sessions_of_turns(connection, tenant, {line.turn_id for line in lines if line.turn_id})
        session_ids = [of_turns.get(line.turn_id, "") if line.turn_id else line.session_id for line in lines]
        updates = trained.last_updates(connection, tenant, session_ids)
    return [updates.get(session_id) for session_id in session_ids]


@router.get("/experiences", response_class=StreamingResponse)
async def list_experiences(
    services: Here,
    principal: Caller,
    session_id: Id | None = None,
    task_id: Id | None = None,
    group_id: Id | None = None,
    split: Split | None = None,
    status: SessionStatus | None = None,
    label: LabelName | None = None,
    credit: Credit | None = None,
    gamma: Annotated[float | None, Query(ge=0.0, le=1.0)] = None,
    reward_bonus_coeff: Annotated[float, Query(ge=0.0, le=1e6)] = 0.0,
    merge: Literal["turn", "chain"] = "turn",
    role: Annotated[
        list[Role] | None, Query(description="Roles that are trained; by default main and sub_agent.")
    ] = None,
) -> StreamingResponse:
    """Return the experiences to train as JSON Lines, with the sessions' credit policy or, as a dry run, another one."""
    if gamma and credit is Credit.PROPAGATE:
        raise InvalidRequest(
            "`gamma` discounts step rewards and has no effect with credit `propagate`; give credit `step_wise`, or "
            "leave `gamma` out",
            param="gamma",
        )
    wanted = experiences.SessionFilter(
        tenant=principal.tenant,
        session_id=session_id,
        task_id=task_id,
        group_id=group_id,
        split=split,
        status=status,
        label=label,
    )

    def lines() -> Generator[bytes]:
        with services.exports.read() as connection:
            for experience in experiences.experiences(
                connection,
                wanted,
                credit=credit,
                gamma=gamma,
                reward_bonus_coeff=reward_bonus_coeff,
                roles=TRAINED_ROLES if role is None else frozenset(role),
                merge=merge,
            ):
                yield orjson.dumps(experience_json(experience)) + b"\n"

    found = lines()
    return Export(await asyncio.to_thread(next, found, b""), found)
