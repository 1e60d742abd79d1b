"""Routes that no engine of ours serves, as embeddings: passed to a configured server, and not captured."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.types import Receive, Scope

from proxy.dialects.base import WireRoute
from proxy.engines.engine import CONNECT_SECONDS
from proxy.engines.http_client import Access, Answer, AnswerTooLong, Disconnected, HttpClient
from proxy.features.upstream.settings import UpstreamSettings
from proxy.http.asgi import cancelled_when_client_leaves, read_body
from proxy.http.connections import LEFT
from proxy.routes.calls import Endpoint, ReplySender
from proxy.routes.declared import Routes
from proxy.services import Beside
from turnwise.errors import EngineUnavailable, NotFound

if TYPE_CHECKING:
    from proxy.services import Services

UPSTREAM_ROUTES = [
    WireRoute(path=f"/v1/{path}", summary="Passed to the upstream")
    for path in (
        *("embeddings", "moderations", "rerank", "audio/speech", "audio/transcriptions", "audio/translations"),
        *("images/generations", "images/edits", "images/variations"),
    )
]
PASSED_HEADERS = (b"content-type", b"accept")


class UpstreamClient(Beside):
    """The connections to the server that such requests are passed to."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        assert isinstance(settings, UpstreamSettings)
        self.client: HttpClient | None = None
        """None where none is configured."""
        if settings.upstream is not None:
            self.client = HttpClient(
                settings.upstream,
                connect_seconds=CONNECT_SECONDS,
                silence_seconds=services.settings.engine_timeout_seconds,
                access=Access(bearer_key=settings.upstream_api_key),
            )

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if self.client is not None:
                await self.client.close()


class UpstreamEndpoint(Endpoint):
    """A route that no engine of ours serves, as embeddings: passed to a configured upstream, else answered with 404.

    Nothing of it is captured: no policy samples there. The client's key stays here; the upstream gets its own key.
    """

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:
        settings, headers = self._services.settings, dict(scope["headers"])
        upstream = self._services.beside[UpstreamClient].client
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await self._caller(headers)
            principal.require("call")
            if upstream is None:
                raise NotFound(
                    f"{self._route.path} is not served: the engine only generates text; "
                    "the setting `upstream` names a server that such requests are passed to",
                    code="no_route",
                )
            passed = {name.decode(): headers[name].decode("latin-1") for name in PASSED_HEADERS if name in headers}
            path = self._route.path.removeprefix("/v1")
            if query := scope["query_string"].decode("latin-1"):
                path += f"?{query}"
            with self._services.open_body(principal.tenant, principal.root_key_id, headers) as memory:
                body = await read_body(receive, max_bytes=settings.max_body_bytes, memory=memory)
                try:
                    with await upstream.request("POST", path, body, passed) as answer:
                        await self._pass_on(answer, reply)
                except Disconnected as error:
                    raise EngineUnavailable(
                        f"the upstream of {self._route.path} cannot be reached ({error}); retry"
                    ) from error

    async def _pass_on(self, answer: Answer, reply: ReplySender) -> None:
        """Send an answer part by part, as it arrives, whatever it is: a stream of sound has no other end."""
        num_bytes, most = 0, self._services.settings.max_reply_bytes
        content_type = answer.content_type or "application/json"
        while part := await answer.next_part():
            num_bytes += len(part)
            if num_bytes > most:
                raise AnswerTooLong(most)
            await reply.passed(answer.status, content_type, part)
        await reply.passed(answer.status, content_type, b"")


def _endpoints(services: Services) -> list[tuple[WireRoute, Endpoint]]:
    return [(route, UpstreamEndpoint(services, services.dialects[0], route)) for route in UPSTREAM_ROUTES]


ROUTES = Routes(router=APIRouter(), actions={}, endpoints=_endpoints)
