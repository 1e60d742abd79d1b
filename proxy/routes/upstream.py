"""Routes that no engine of ours serves, such as embeddings: passed to a configured upstream, else answered with 404.

Nothing of them is captured: no policy samples there. The client's key stays here; the upstream gets its own key.
"""

from __future__ import annotations

from starlette.types import Receive, Scope

from proxy.dialects.base import WireRoute
from proxy.engines.http_client import Disconnected
from proxy.http.asgi import cancelled_when_client_leaves, read_body
from proxy.http.connections import LEFT
from proxy.routes.reply_sender import Endpoint, ReplySender
from turnwise.errors import EngineUnavailable, NotFound

UPSTREAM_ROUTES = [
    WireRoute(path=f"/v1/{path}", summary="Passed to the upstream")
    for path in (
        *("embeddings", "moderations", "rerank", "audio/speech", "audio/transcriptions", "audio/translations"),
        *("images/generations", "images/edits", "images/variations"),
    )
]
PASSED_HEADERS = (b"content-type", b"accept")


class Upstream(Endpoint):
    """One route that is passed on."""

    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None:
        settings, headers = self._services.settings, dict(scope["headers"])
        upstream = self._services.upstream
        with cancelled_when_client_leaves(scope["extensions"][LEFT]):
            principal = await self._services.authenticator.authenticate(headers)
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
            with await self._services.bodies.reserve(principal, headers):
                body = await read_body(receive, max_bytes=settings.max_body_bytes)
                try:
                    with await upstream.request("POST", path, body, passed) as answer:
                        content = await answer.read(settings.max_reply_bytes)
                except Disconnected as error:
                    raise EngineUnavailable(
                        f"the upstream of {self._route.path} cannot be reached ({error}); retry"
                    ) from error
        content_type = (answer.content_type or "application/json").encode("latin-1")
        await reply.whole(content, status=answer.status, content_type=content_type)
