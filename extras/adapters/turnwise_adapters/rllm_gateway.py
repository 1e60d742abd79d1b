"""rLLM's model gateway in front of a proxy, for `rllm_model_gateway.GatewayClient` and the agents that it starts.

    python -m turnwise_adapters.rllm_gateway --proxy http://127.0.0.1:8100 --port 9090

Sessions and traces are answered from the proxy's sessions and turns; calls under `/sessions/ID/v1` go on to the proxy,
streamed. Engines are those of the proxy: registering a worker is refused. A deleted session is deleted in the proxy.
"""

from __future__ import annotations

import datetime as dt

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.types import Json
from turnwise_adapters.relay import Relay, gateway_command

WORKERS_REFUSED = "engines are named when the proxy starts: turnwise proxy --engine URL"


class Gateway:
    """The routes of rLLM's gateway over one proxy."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._client = relay.client

    def routes(self) -> list[Route]:
        """Return the routes."""
        calls = ["GET", "POST"]
        return [
            Route("/health", self._health),
            Route("/sessions", self._create, methods=["POST"]),
            Route("/sessions", self._list),
            Route("/sessions/{session_id}", self._info),
            Route("/sessions/{session_id}", self._delete, methods=["DELETE"]),
            Route("/sessions/{session_id}/traces", self._traces),
            Route("/traces/{trace_id}", self._trace),
            Route("/admin/workers", self._no_workers),
            Route("/admin/workers", self._refuse_worker, methods=["POST"]),
            Route("/admin/flush", self._flush, methods=["POST"]),
            Route("/sessions/{session_id}/v1/{path:path}", self._relay.call, methods=calls),
            Route("/v1/{path:path}", self._relay.call, methods=calls),
        ]

    async def _health(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"status": "ok"})

    async def _create(self, request: Request) -> Response:
        body = await request.json() if await request.body() else {}
        given = {name: body[name] for name in ("session_id", "metadata") if body.get(name)}
        session = await self._client.create_session(**given)
        return JSONResponse({"session_id": session.session_id, "url": f"/sessions/{session.session_id}/v1"})

    async def _list(self, request: Request) -> Response:
        found: list[Json] = []
        limit = int(request.query_params.get("limit") or 1000)
        since = float(request.query_params.get("since") or 0)
        async for session in self._client.sessions():
            if _timestamp(session["created_at"]) >= since:
                found.append(_session_info(session))
            if len(found) == limit:
                break
        return JSONResponse(found)

    async def _info(self, request: Request) -> Response:
        return JSONResponse(_session_info(await self._client.session(request.path_params["session_id"])))

    async def _delete(self, request: Request) -> Response:
        answer = await self._relay.http.delete(f"/v1/sessions/{request.path_params['session_id']}")
        return JSONResponse({"deleted": answer.json().get("num_turns", 0)}, answer.status_code)

    async def _traces(self, request: Request) -> Response:
        since = float(request.query_params.get("since") or 0)
        limit = request.query_params.get("limit")
        session_id = request.path_params["session_id"]
        if not (await self._client.session(session_id))["train"]:
            return JSONResponse([])  # rLLM trains what it reads here
        turns = self._client.turns(session_id, prompt="whole")
        found = [_trace_of(turn) async for turn in turns if _timestamp(turn["created_at"]) >= since]
        return JSONResponse(found[: int(limit)] if limit else found)

    async def _trace(self, request: Request) -> Response:
        return JSONResponse(_trace_of(await self._client.turn(request.path_params["trace_id"], prompt="whole")))

    async def _no_workers(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse([])

    async def _refuse_worker(self, request: Request) -> Response:  # noqa: ARG002
        return JSONResponse({"error": WORKERS_REFUSED}, 409)

    async def _flush(self, request: Request) -> Response:  # noqa: ARG002  a turn is stored before its reply ends
        return JSONResponse({"status": "flushed"})


def _session_info(session: Json) -> Json:
    return {
        "session_id": session["session_id"],
        "trace_count": session["num_turns"],
        "created_at": _timestamp(session["created_at"]),
        "metadata": session["metadata"],
    }


def _trace_of(turn: Json) -> Json:
    """Return a turn as rLLM's `TraceRecord`."""
    prompt, sampled = turn["prompt_token_ids"], turn["token_ids"]
    return {
        "trace_id": turn["turn_id"],
        "session_id": turn["session_id"],
        "model": turn["model"],
        "messages": turn["messages"],
        "prompt_token_ids": prompt,
        "response_message": turn["response"],
        "completion_token_ids": sampled,
        "logprobs": turn["logprobs"],
        "finish_reason": turn["finish_reason"],
        "latency_ms": 1000.0 * turn["duration_seconds"],
        "token_counts": {"prompt": len(prompt), "completion": len(sampled)},
        "timestamp": _timestamp(turn["created_at"]),
        "metadata": {name: turn[name] for name in ("outcome", "reason", "policy_version_first", "policy_version_last")},
    }


def _timestamp(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


main = gateway_command(
    lambda relay: Gateway(relay).routes(),
    port=9090,
    summary="Serve rLLM's gateway routes over a proxy. It checks no key: all who reach it have the key's rights.",
)

if __name__ == "__main__":
    main()
