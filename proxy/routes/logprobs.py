"""`GET /v1/turns/{turn_id}/logprobs`: a turn's tokens under the version that its policy is served with now."""

from __future__ import annotations

import dataclasses
import math

from fastapi import APIRouter, Response

from proxy.routes.checked_route import CheckedRoute, Id
from proxy.routes.serialise import Caller, Here, answer, describe_answer
from turnwise.chains import is_trainable
from turnwise.errors import Conflict
from turnwise.store import sessions, turns
from turnwise.store.database import Connection
from turnwise.store.turns import TurnView
from turnwise.types import Logprobs, Session
from turnwise.verify.engine import NOT_REPEATABLE, POSITIONS_AT_ONCE

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])

MAX_TOKENS = 2048
"""Sampled tokens whose logprobs are recomputed; those behind them are left out."""
IDS_AT_ONCE = 500_000
"""Most token ids in one call to the engine, unless a single prompt has more."""


@dataclasses.dataclass(slots=True, kw_only=True)
class RecomputedLogprobs:
    """The logprobs of a turn's sampled tokens when they were sampled, and now."""

    turn_id: str
    policy_version_first: int
    """The version that sampled the first token."""
    policy_version_last: int
    policy_version: int
    """The version that is served now."""
    before: Logprobs
    """As stored: one for each sampled token."""
    after: list[float | None]
    """Under the served version, with the turn's temperature, top-p, top-k and min-p, for the first 2048 tokens; null
    for a token that it cannot sample under these."""


@router.get("/turns/{turn_id}/logprobs", responses=describe_answer("RecomputedAnswer"))
async def recompute_logprobs(
    turn_id: Id,
    services: Here,
    principal: Caller,
) -> Response:
    """Recompute the logprobs of a turn's sampled tokens under the version that its policy is served with.

    The engine samples one token for each.
    """

    def read(connection: Connection) -> tuple[TurnView, Session]:
        view = turns.read_turn(connection, principal.tenant, turn_id)
        return view, sessions.read_session(connection, principal.tenant, view.turn.session_id)

    view, session = await services.database.fetch(read)
    _check_repeatable(view)
    lane = await services.pool.served_lane(session)
    version = lane.version
    turn = view.turn
    token_ids = [*view.prompt_token_ids.tolist(), *turn.token_ids.tolist()][: turn.prompt_length + MAX_TOKENS]
    step = max(1, min(POSITIONS_AT_ONCE, IDS_AT_ONCE // len(token_ids)))
    after: list[float] = []
    for start in range(turn.prompt_length, len(token_ids), step):
        positions = list(range(start, min(start + step, len(token_ids))))
        after += await lane.engine.token_logprobs(lane.model, token_ids, positions, turn.sampling)
    if lane.version != version:
        raise Conflict(f"version {lane.version} was loaded in the place of {version} meanwhile; ask again")
    return answer(
        RecomputedLogprobs(
            turn_id=turn_id,
            policy_version_first=turn.policy_version_first,
            policy_version_last=turn.policy_version_last,
            policy_version=version,
            before=turn.logprobs.astype(float),
            after=[each if math.isfinite(each) else None for each in after],
        )
    )


def _check_repeatable(view: TurnView) -> None:
    """Check that the turn's logprobs can be compared with recomputed ones.

    Raises:
        Conflict: they cannot, with the reason.
    """
    if not is_trainable(view.turn) or not view.turn.token_ids.size:
        raise Conflict("this turn has no logprobs that could be compared: it is not trainable, or sampled nothing")
    if names := [name for name in NOT_REPEATABLE if view.turn.sampling.get(name)]:
        raise Conflict(f"this turn was sampled with {', '.join(names)}, whose effect depends on earlier tokens")
