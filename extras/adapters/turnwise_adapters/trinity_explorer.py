"""Trinity-RFT's explorer in serve mode, for its `TrinityClient`: `feedback` rewards turns, `commit` ends sessions.

    python -m turnwise_adapters.trinity_explorer --proxy http://127.0.0.1:8100 --port 8010

Calls go on to the proxy, which finds the session of each conversation. `feedback` rewards the turns of its message ids
and names their sessions' task; `commit` ends the sessions that got feedback since the last one. What got feedback and
was not committed is known to this process alone.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.types import Json
from turnwise_adapters.relay import Relay, gateway_command

SOURCE = "trinity"
SUCCESS = {"status": "success"}


class Explorer:
    """The routes of Trinity's explorer over one proxy."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._client = relay.client
        self._rewarded: dict[str, None] = {}
        """Sessions with feedback that is not committed, in order."""
        self._counts = {"num_feedbacks": 0, "num_committed_sessions": 0}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/feedback", self._feedback, methods=["POST"]),
            Route("/commit", self._commit, methods=["POST"]),
            Route("/v1/{path:path}", self._relay.call, methods=["GET", "POST"]),
        ]

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return Response()

    async def _metrics(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({**self._counts, "num_sessions_to_commit": len(self._rewarded)})

    async def _feedback(self, request: Request) -> Response:
        body: Json = await request.json()
        reward, turn_ids = body.get("reward"), body.get("msg_ids")
        if not isinstance(reward, int | float) or not isinstance(turn_ids, list) or not turn_ids:
            return JSONResponse({"error": "msg_ids must be a list of ids and reward a number"}, 400)
        turns = [await self._client.turn(turn_id) for turn_id in turn_ids]
        sessions = dict.fromkeys(turn["session_id"] for turn in turns)
        for session_id in sessions.keys() - self._rewarded.keys():
            task = {} if body.get("task_id") is None else {"task_id": body["task_id"], "group_id": body["task_id"]}
            await self._client.create_session(
                session_id=session_id, credit="step_wise", run=int(body.get("run_id") or 0), **task
            )
        await self._client.rewards([{"turn_id": one, "value": reward, "source": SOURCE} for one in turn_ids])
        self._rewarded |= sessions
        self._counts["num_feedbacks"] += 1
        return JSONResponse(SUCCESS)

    async def _commit(self, request: Request) -> Response:  # noqa: ARG002
        for session_id in list(self._rewarded):
            await self._client.end_session(session_id)
            del self._rewarded[session_id]
            self._counts["num_committed_sessions"] += 1
        return JSONResponse(SUCCESS)


main = gateway_command(
    lambda relay: Explorer(relay).routes(),
    port=8010,
    summary="Serve the routes of Trinity's explorer over a proxy. It checks no key.",
)

if __name__ == "__main__":
    main()
