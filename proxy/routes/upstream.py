"""Routes that no engine of ours serves, such as embeddings: passed to a configured upstream, else answered with 404.

Nothing of them is captured: no policy samples there. The client's key stays here; the upstream gets its own key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from proxy.dialects.chat import ChatCompletions
from proxy.engines.http_client import Access, Disconnected, HttpClient
from proxy.http.asgi import cancelled_when_client_leaves, read_body
from proxy.http.connections import LEFT
from proxy.routes.calls import query_of
from proxy.routes.reply_sender import ReplySender
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


class Upstream:
    """One route that is passed on."""

    def __init__(self, services: Services, path: str) -> None:
        self._services = services
        self._path = path
        settings = services.settings
        key = settings.upstream_api_key
        self._client = settings.upstream and HttpClient(
            settings.upstream,
            connect_seconds=CONNECT_SECONDS,
            silence_seconds=settings.engine_timeout_seconds,
            access=Access(bearer_key=None if key is None else key.get_secret_value()),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        reply = ReplySender(send, ChatCompletions())
        try:
            with cancelled_when_client_leaves(scope["extensions"][LEFT]):
                await self._serve(scope, receive, send)
        except Exception as error:  # noqa: BLE001  the request's outermost edge: the client must get an answer
            await reply.fail(error, self._services)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings, headers = self._services.settings, dict(scope["headers"])
        principal = await self._services.authenticator.authenticate(headers)
        principal.require("call")
        if not self._client:
            raise NotFound(
                f"{self._path} is not served: the engine only generates text; "
                "the setting `upstream` names a server that such requests are passed to",
                code="no_route",
            )
        with await self._services.bodies.reserve(principal, headers):
            await self._pass_on(scope, await read_body(receive, max_bytes=settings.max_body_bytes), headers, send)

    async def _pass_on(self, scope: Scope, body: bytes, headers: dict[bytes, bytes], send: Send) -> None:
        assert self._client
        settings = self._services.settings
        passed = {name.decode(): headers[name].decode("latin-1") for name in PASSED_HEADERS if name in headers}
        path = self._path.removeprefix("/v1") + (
            "?" + scope["query_string"].decode("latin-1") if query_of(scope) else ""
        )
        try:
            with await self._client.request("POST", path, body, passed) as answer:
                content = await answer.read(settings.max_reply_bytes)
        except Disconnected as error:
            raise EngineUnavailable(f"the upstream of {self._path} cannot be reached ({error}); retry") from error
        kind = (answer.content_type or "application/json").encode("latin-1")
        sent = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": sent})
        await send({"type": "http.response.body", "body": content})
