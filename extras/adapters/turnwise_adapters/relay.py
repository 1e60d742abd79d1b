"""What the gateways for other projects' clients share: calls passed on to the proxy, and errors as statuses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import click
import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turnwise.client import AsyncClient
from turnwise.client.connection import DEFAULT_BASE_URL
from turnwise.errors import ClientError, Conflict, NotFound

HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host"})
"""Headers of one connection, which are not passed on."""
STATUS_OF: dict[type[ClientError], int] = {NotFound: 404, Conflict: 409}


class Relay:
    """A proxy behind a gateway."""

    def __init__(self, proxy: str, api_key: str | None) -> None:
        """`api_key` is the gateway's own, and that of calls without one."""
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self.client = AsyncClient(proxy, api_key)
        self.http = httpx2.AsyncClient(base_url=proxy, headers=headers, timeout=None)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()
        await self.http.aclose()

    async def call(self, request: Request) -> Response:
        """Pass a call on to the proxy, and its answer back as it comes."""
        path = request.url.path
        request_to_proxy = self.http.build_request(
            request.method,
            path if "/v1/" in path else f"/v1{path}",
            content=await request.body(),
            headers=_end_to_end(request.headers),
            params=request.url.query,
        )
        answer = await self.http.send(request_to_proxy, stream=True)
        close = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, _end_to_end(answer.headers), background=close)


def gateway_command(routes: Callable[[Relay], Sequence[Route]], *, port: int, summary: str) -> click.Command:
    """Return the command that serves a gateway's routes, by default at this port."""

    @click.command(help=summary)
    @click.option("--proxy", default=DEFAULT_BASE_URL, show_default=True, help="The proxy.")
    @click.option("--api-key", envvar="TURNWISE_API_KEY", help="A key of the proxy; it is used for calls without one.")
    @click.option("--host", default="127.0.0.1", show_default=True)
    @click.option("--port", type=click.IntRange(1, 65535), default=port, show_default=True)
    def main(proxy: str, api_key: str | None, host: str, port: int) -> None:
        relay = Relay(proxy, api_key)
        uvicorn.run(application(routes(relay), relay), host=host, port=port, log_level="warning")

    return main


def application(routes: Sequence[Route], relay: Relay) -> Starlette:
    """Return an application of these routes, which closes the relay at its end."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:  # noqa: ARG001
        yield
        await relay.close()

    handlers: dict[Any, Any] = {ClientError: _on_error}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


async def _on_error(request: Request, error: ClientError) -> Response:  # noqa: ARG001
    return JSONResponse({"error": str(error)}, STATUS_OF.get(type(error), 400))
