"""AReaL's sessions (`/rl/*`) in front of a proxy: which session a key is, and which turn a reward gets.

    python -m turnwise_adapters.areal_sessions --proxy http://127.0.0.1:8100 --port 8020

A started session is one of the proxy, whose session key identifies it in all further calls. A reward is that of one
turn, by default of the last. Which session a key belongs to is known to this process alone. The client's
`export_interactions` has no answer here: the proxy's experiences take its place.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.types import Json
from turnwise_adapters.relay import Relay, gateway_command

SOURCE = "areal"
SUCCESS = {"message": "success"}
NO_EXPORT = "trajectories are read from the proxy: GET /v1/experiences, or turnwise export"


class Sessions:
    """The session routes of AReaL's proxy server over one proxy."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._client = relay.client
        self._session_of: dict[str, str] = {}
        """Open sessions by their key."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        calls = ["GET", "POST"]
        return [
            Route("/health", self._health),
            Route("/rl/start_session", self._start, methods=["POST"]),
            Route("/rl/set_reward", self._reward, methods=["POST"]),
            Route("/rl/end_session", self._end, methods=["POST"]),
            Route("/export_trajectories", self._refuse_export, methods=["POST"]),
            Route("/v1/{path:path}", self._relay.call, methods=calls),
            Route("/chat/completions", self._relay.call, methods=calls),
            Route("/responses", self._relay.call, methods=calls),
        ]

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"status": "ok"})

    async def _start(self, request: Request) -> Response:
        body: Json = await request.json()
        session = await self._client.create_session(
            task_id=body["task_id"], group_id=body["task_id"], credit="step_wise", key_may="call_and_reward"
        )
        self._session_of[session.api_key] = session.session_id
        return JSONResponse({"session_id": session.session_id, "api_key": session.api_key}, 201)

    async def _reward(self, request: Request) -> Response:
        session_id = self._session_of.get(_key_of(request))
        if session_id is None:
            return _unknown_key()
        body: Json = await request.json()
        turn_id = body.get("interaction_id")
        if turn_id is None:
            turns = [turn["turn_id"] async for turn in self._client.turns(session_id)]
            if not turns:
                return JSONResponse({"detail": f"session {session_id!r} has no call to reward yet"}, 400)
            turn_id = turns[-1]
        await self._client.reward(body["reward"], session_id=session_id, turn_id=turn_id, source=SOURCE)
        return JSONResponse(SUCCESS)

    async def _end(self, request: Request) -> Response:
        session_id = self._session_of.get(_key_of(request))
        if session_id is None:
            return _unknown_key()
        await self._client.end_session(session_id)
        del self._session_of[_key_of(request)]
        return JSONResponse(SUCCESS)

    async def _refuse_export(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"detail": NO_EXPORT}, 501)


def _key_of(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _unknown_key() -> Response:
    return JSONResponse({"detail": "this key is that of no open session; start one by /rl/start_session"}, 401)


main = gateway_command(
    lambda relay: Sessions(relay).routes(),
    port=8020,
    summary="Serve AReaL's session routes over a proxy. It checks no admin key.",
)

if __name__ == "__main__":
    main()
