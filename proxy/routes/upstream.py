"""Routes that no engine of ours serves, such as embeddings: passed to a configured upstream, else answered with 404.

Nothing of them is captured: no policy samples there. The client's key stays here; the upstream gets its own key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Receive, Scope

from proxy.dialects.chat import ChatCompletions
from proxy.engines.http_client import Access, Disconnected, HttpClient
from proxy.http.asgi import cancelled_when_client_leaves, read_body
from proxy.http.connections import LEFT
from proxy.routes.calls import query_of
from proxy.routes.reply_sender import Endpoint, ReplySender
from turnwise.errors import EngineUnavailable, NotFound

if TYPE_CHECKING:
    from proxy.services import Services

PATHS = (
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
)
"""All of them are POST."""
CONNECT_SECONDS = 5.0
PASSED_HEADERS = (b"content-type", b"accept")


class Upstream(Endpoint):
    """One route that is passed on."""

    def __init__(self, services: Services, path: str) -> None:
        super().__init__(services, ChatCompletions())
        self._path = path
        settings = services.settings
        self._client = settings.upstream and HttpClient(
            settings.upstream,
            connect_seconds=CONNECT_SECONDS,
            silence_seconds=settings.engine_timeout_seconds,
            access=Access(bearer_key=settings.upstream_api_key),
        )

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:
        """Pass a request on, and its answer back."""
        settings, headers = self._services.settings, dict(scope["headers"])
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await self._services.authenticator.authenticate(headers)
            principal.require("call")
            if not self._client:
                raise NotFound(
                    f"{self._path} is not served: the engine only generates text; "
                    "the setting `upstream` names a server that such requests are passed to",
                    code="no_route",
                )
            with await self._services.bodies.reserve(principal, headers):
                body = await read_body(receive, max_bytes=settings.max_body_bytes)
                status, content_type, content = await self._ask(self._client, scope, body, headers)
        await reply.whole(content, status=status, content_type=content_type.encode("latin-1"))

    async def _ask(
        self, client: HttpClient, scope: Scope, body: bytes, headers: dict[bytes, bytes]
    ) -> tuple[int, str, bytes]:
        """Return the status, the content type and the content of the upstream's answer."""
        passed = {name.decode(): headers[name].decode("latin-1") for name in PASSED_HEADERS if name in headers}
        path = self._path.removeprefix("/v1") + (
            "?" + scope["query_string"].decode("latin-1") if query_of(scope) else ""
        )
        try:
            with await client.request("POST", path, body, passed) as answer:
                content = await answer.read(self._services.settings.max_reply_bytes)
        except Disconnected as error:
            raise EngineUnavailable(f"the upstream of {self._path} cannot be reached ({error}); retry") from error
        return answer.status, answer.content_type or "application/json", content
