"""The route that forks a session: another session continues from one of its turns, on the same tokens."""

from __future__ import annotations

import uuid
from typing import Literal

from fastapi import APIRouter, Request, Response

from proxy.continuation.which_session import check_id
from proxy.routes.checked_route import CheckedRoute, Id
from proxy.routes.serialise import Caller, Here, answer, describe_answer
from proxy.routes.sessions import NewSession, new_session_json
from turnwise.errors import NotFound
from turnwise.store import queries
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
    holds copies of the turn and its ancestors, which are not trained. Repeated with the same `session_id`, the call
    answers with the same session.
    """
    wanted = fork or Fork()

    def read(connection: Connection) -> Session:
        forked_id = queries.sessions_of_turns(connection, principal.tenant, [turn_id]).get(turn_id)
        if forked_id is None:
            raise NotFound(f"there is no turn {turn_id!r}", param="turn_id")
        return queries.session(connection, principal.tenant, forked_id)

    forked = await services.database.fetch(read)
    fields = wanted.model_dump(exclude={"key_may", "key_expires_seconds", "at", "session_id", "metadata", "policy"})
    left_out = {"task_id", "credit", "gamma", "sampling", "user_id"} - wanted.model_fields_set
    session = Session(
        session_id=check_id(wanted.session_id or f"fork-{uuid.uuid4().hex}"),
        tenant=principal.tenant,
        policy_id=forked.policy_id,
        opened_by="api",
        metadata={**wanted.metadata, "forked_from": {"session_id": forked.session_id, "turn_id": turn_id}},
        **fields | {name: getattr(forked, name) for name in left_out},
    )
    stored = await services.sessions.fork(session, turn_id, before=wanted.at == "before")
    services.forget_session(stored.tenant, stored.session_id)
    return answer(await new_session_json(stored, wanted, request, services, principal))
