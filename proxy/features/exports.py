"""The route that reads experiences as JSON Lines, however many, beside the calls."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Generator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from proxy.features.places import Places
from proxy.features.session_filter import session_filter
from proxy.routes.control import Caller, CheckedRoute, Here, Id
from proxy.routes.declared import Routes
from proxy.routes.sessions import GAMMA_UNUSED
from proxy.services import Beside, Services
from turnwise.errors import InvalidRequest
from turnwise.features import advantages
from turnwise.features.exports import experience_json
from turnwise.json_text import dumps
from turnwise.store import experiences
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import TRAINED_ROLES, Credit, Role

NUM_EXPORTS = 4
"""Maximum number of pages of exports that are read at the same time."""
MAX_EXPORTS, MAX_TENANT_EXPORTS = 64, 4
"""Maximum number of concurrent exports, and of those of one tenant; each holds a page of sessions in memory."""
router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["rewards"])


class Exports(Beside):
    """Connections and places of exports, so that they do not delay other reads."""

    def __init__(self, services: Services) -> None:
        self.database = Database(services.settings.database.get_secret_value(), pool_size=NUM_EXPORTS)
        self.places = Places("read exports", MAX_EXPORTS, MAX_TENANT_EXPORTS)

    async def run(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.database.close()


class Export(StreamingResponse):
    """Streams lines, and frees the tenant's place even if the client disconnects early."""

    def __init__(self, first: bytes, lines: Generator[bytes]) -> None:
        self._lines = lines
        super().__init__(itertools.chain((first,), lines), media_type="application/jsonl")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.to_thread(self._lines.close)


@router.get("/experiences", response_class=StreamingResponse)
async def list_experiences(
    services: Here,
    principal: Caller,
    matching: Annotated[SessionFilter, Depends(session_filter)],
    session_id: Id | None = None,
    credit: Credit | None = None,
    gamma: Annotated[float | None, Query(ge=0.0, le=1.0)] = None,
    reward_bonus_coeff: Annotated[float, Query(ge=0.0, le=1e6)] = 0.0,
    merge: Literal["turn", "chain"] = "turn",
    role: Annotated[list[Role] | None, Query(description="Roles that are trained; by default a trainer's.")] = None,
) -> StreamingResponse:
    """Return the experiences to train as JSON Lines, with the sessions' credit policy or, as a dry run, another one.

    Sessions that are over, and a session that `session_id` names, which may be open: `status` says so. `reward` is that
    of the turn, or of a chain under step-wise credit the sum of its turns'; `session_reward` that of the session.
    `return` and `advantage` have one value a turn. Before training `advantage` is what `grpo` would compute from the
    sessions of the group that are over now, and null for a session without a group. Sessions are read in pages, each as
    it is then. Those that are marked `train = false` are left out; `train=false` returns them alone.
    """
    if gamma and credit is Credit.PROPAGATE:
        raise InvalidRequest(GAMMA_UNUSED, param="gamma")
    wanted = dataclasses.replace(matching, session_id=session_id, train=matching.train is not False)
    roles = TRAINED_ROLES if role is None else frozenset(role)
    shape = experiences.Shape(
        credit=credit, gamma=gamma, reward_bonus_coeff=reward_bonus_coeff, roles=roles, merge=merge
    )

    exports: Exports = services.beside[Exports]

    def lines() -> Generator[bytes]:
        with exports.places.taken(principal.tenant):
            for experience in advantages.with_advantages(exports.database, wanted, shape):
                yield dumps(experience_json(experience)) + b"\n"

    found = lines()
    return Export(await asyncio.to_thread(next, found, b""), found)


ROUTES = Routes(router=router, actions={"GET /v1/experiences": "experiences"})
