"""A pass-through proxy without recording: Starlette, aiohttp's client, one worker.

It is the baseline of bench/proxy.py.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def create_app(engine: str) -> Starlette:
    """Build the pass-through."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            app.state.http = http
            yield

    async def chat(request: Request) -> Response:
        body = await request.body()
        headers = {"content-type": "application/json"}
        if b'"stream":true' not in body:
            async with request.app.state.http.post(engine, data=body, headers=headers) as answer:
                return Response(await answer.read(), media_type="application/json")

        async def relayed() -> AsyncIterator[bytes]:
            async with request.app.state.http.post(engine, data=body, headers=headers) as answer:
                async for data in answer.content.iter_any():
                    yield data

        return StreamingResponse(relayed(), media_type="text/event-stream")

    async def healthz(_: Request) -> Response:
        return Response("ok")

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/healthz", healthz)]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True)
    given = parser.parse_args()
    app = create_app(f"{given.engine}/v1/chat/completions")
    uvicorn.run(app, port=given.port, loop="uvloop", http="httptools", access_log=False, log_level="warning")
