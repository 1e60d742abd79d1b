"""The route that forks a session: a new one begins with copies of a turn and its ancestors."""

from __future__ import annotations

import uuid
from typing import Literal

from fastapi import APIRouter, Request, Response

from proxy.routes.calls import admitted
from proxy.routes.control import Caller, CheckedRoute, Here, Id, answer, describe_answer
from proxy.routes.declared import Routes
from proxy.routes.sessions import NewSession, check_fields, new_session_json
from proxy.services import Services
from proxy.sessions.identities import check_id
from turnwise.features import forks
from turnwise.store import selection, sessions, turns
from turnwise.store.database import Connection
from turnwise.types import Session

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


class Fork(NewSession):
    """The fields of the new session.

    `task_id`, `credit`, `gamma`, `sampling` and `user_id` are by default the forked one's.
    """

    at: Literal["after", "before"] = "after"
    """Go on after the turn's reply, or before it, so that the same prompt is sampled again."""


@router.post("/turns/{turn_id}/fork", responses=describe_answer("NewSessionAnswer"))
async def fork_turn(
    turn_id: Id,
    request: Request,
    services: Here,
    principal: Caller,
    fork: Fork | None = None,
) -> Response:
    """Create a session that continues from this turn with the same tokens, for a harness that can replay.

    The harness restores its environment, and calls the new session with the conversation up to here. The new session
    holds copies of the turn and its ancestors, which are not trained, and their policy is its own. Repeated with the
    same `session_id`, the call answers with the same session.
    """
    wanted = fork or Fork()
    check_fields(wanted, services)

    def read(connection: Connection) -> tuple[Session, int, int]:
        forked_id = selection.session_of_turn(connection, principal.tenant, turn_id)
        held = sessions.read_session(connection, principal.tenant, forked_id)
        turn = turns.find_turn(connection, principal.tenant, forked_id, turn_id=turn_id)
        if turn is None:
            return held, held.policy_id, 0
        return held, turn.policy_id, turn.prompt_length + len(turn.token_ids)

    forked, policy_id, num_tokens = await services.database.fetch(read)
    fields = wanted.model_dump(exclude={"key_may", "key_expires_seconds", "at", "session_id", "metadata", "policy"})
    left_out = {"task_id", "credit", "gamma", "sampling", "user_id"} - wanted.model_fields_set
    session = Session(
        session_id=check_id(wanted.session_id or f"fork-{uuid.uuid4().hex}"),
        tenant=principal.tenant,
        policy_id=policy_id,
        key_id=principal.root_key_id,
        opened_by="api",
        metadata={
            **services.stored_document(wanted.metadata),
            "forked_from": {"session_id": forked.session_id, "turn_id": turn_id},
        },
        **fields | {name: getattr(forked, name) for name in left_out},
    )
    async with admitted(services, principal, request.scope) as admission:
        stored = await _copy(services, session, turn_id, before=wanted.at == "before")
        admission.num_tokens = num_tokens
    services.forget_session(stored.tenant, stored.session_id)
    return answer(await new_session_json(stored, wanted, request, services, principal))


async def _copy(services: Services, session: Session, turn_id: str, *, before: bool) -> Session:
    """Store `session` with copies of a turn and its ancestors, in short transactions."""
    path, num_copied = await services.database.fetch(forks.read_path, session, turn_id, before=before)
    root_id = path[0] if path else None
    while True:
        some = path[num_copied : num_copied + forks.SLICE_TURNS]
        async with services.writer.slices:
            stored, num_more = await services.writer.do(forks.copy_turns, session, root_id, some)
        num_copied += num_more
        if num_copied == len(path):
            return stored


ROUTES = Routes(router=router, actions={"POST /v1/turns/{turn_id}/fork": "create"})
