"""What every request passes first: its ids, checks against web pages, and CORS; features see it begin and end.

A proxy without keys treats every caller on loopback as an administrator. A web page in the operator's browser is such a
caller too: it can send simple requests to any local port, and with a rebound host name it can read the replies. While
there are no keys, requests must name a known host, must not come from a foreign origin, and must send JSON.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.http import problems
from proxy.http.asgi import send_whole
from proxy.http.connections import RefusedHead
from turnwise.errors import Forbidden, InvalidRequest, StoreError, TurnwiseError, UnsupportedMediaType
from turnwise.telemetry.requests import RequestContext, current_request, make_context

if TYPE_CHECKING:
    from proxy.services import Services

REQUEST_ID = b"x-request-id"
JSON_TYPE = b"application/json"
KEY_HEADERS = frozenset({b"x-api-key", b"x-goog-api-key"})
IDENTITY = b"identity"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PREFLIGHT_SECONDS = b"600"
ALLOWED_METHODS = b"GET, POST, PUT, DELETE"
MAX_QUERY_PARAMETERS = 100
"""Most query parameters of a request; no route reads more than a few, and each takes time to decode."""


class Edge:
    """Wraps the app."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        settings = services.settings
        self._app = app
        self._services = services
        self._origins = frozenset(settings.cors_origins)
        public = urlsplit(settings.public_url or "")
        self._hosts = LOOPBACK_NAMES | {settings.host, *settings.allowed_hosts, public.hostname} - {None}
        self._public = f"{public.scheme}://{public.netloc}"
        """Origin of the pages of a server in front of the proxy, which may serve HTTPS."""
        self._observers = services.observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = dict(scope["headers"])
        context = make_context(
            read.get(REQUEST_ID, b"").decode("latin-1"), read.get(b"traceparent", b"").decode("latin-1")
        )
        for each in self._observers:
            context = each.begun(context, scope)
        outgoing = _Outgoing(send, self._headers(context, read.get(b"origin")))
        current_request.set(context)
        started = time.perf_counter()
        try:
            await self._serve(scope, receive, outgoing, read)
        finally:
            for each in self._observers:
                each.ended(context, scope, outgoing.status, outgoing.num_bytes, time.perf_counter() - started)

    def log_head(self, refused: RefusedHead) -> None:
        """Take a request that was refused by its head alone."""
        for each in self._observers:
            each.refused(refused)

    def close(self) -> None:
        for each in self._observers:
            each.close()

    async def _serve(self, scope: Scope, receive: Receive, outgoing: _Outgoing, read: dict[bytes, bytes]) -> None:
        if scope["method"] == "OPTIONS" and self._origins and b"origin" in read:
            await _answer_preflight(read, outgoing)
            return
        try:
            _check_query(scope["query_string"])
            if b"content-encoding" in read:
                _check_encoding([value for name, value in scope["headers"] if name == b"content-encoding"])
            receive = await self._check_caller(read, scope, receive)
        except TurnwiseError as error:
            status, body, headers = problems.answer(error)
            self._services.metrics.refused.labels(problems.code_of(error)).inc()
            encoded = self._services.dialects.of_path(scope["path"], read).encode_error(status, body)
            await send_whole(outgoing, status, encoded, headers)
            return
        await self._app(scope, receive, outgoing)

    async def _check_caller(self, read: dict[bytes, bytes], scope: Scope, receive: Receive) -> Receive:
        """Check a request to a proxy without keys; return the function by which the app receives its body."""
        if not await self._has_no_keys():
            return receive
        named = read.get(b"host", b"").decode("latin-1")
        host = host_name(named)
        if host not in self._hosts:
            raise Forbidden(
                f"this proxy has no keys and does not answer to the host name {host!r}; create a key with "
                "`turnwise keys create`, or add the name to --allowed-hosts",
                code="unknown_host",
            )
        origin = read.get(b"origin", b"").decode("latin-1")
        own = {f"{scope['scheme']}://{named}", self._public}
        if origin and origin not in own and not self._origins & {origin, "*"}:
            raise Forbidden(
                f"this proxy has no keys and answers no web page from {origin!r}; create a key with "
                "`turnwise keys create`, or add the origin to --cors-origins",
                code="foreign_origin",
            )
        given = read.get(b"content-type", JSON_TYPE) if scope["method"] in ("POST", "PUT") else JSON_TYPE
        # A page sends a request with a key only after a preflight, which is answered for the origins above alone.
        has_key = read.get(b"authorization", b"").startswith(b"Bearer ") or not KEY_HEADERS.isdisjoint(read)
        if given == JSON_TYPE or has_key:
            return receive
        kind = given.decode("latin-1").partition(";")[0].strip().lower()
        if not kind or kind == "application/json" or kind.endswith("+json"):
            return receive
        of_empty = await _receive_of_empty(read, receive)
        if of_empty is None:
            raise UnsupportedMediaType(f"a body of type {kind!r} is not accepted; send content-type: application/json")
        return of_empty

    async def _has_no_keys(self) -> bool:
        try:
            return bool(await self._services.authenticator.is_open())
        except StoreError:
            return True

    def _headers(self, context: RequestContext, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        headers = [(REQUEST_ID, context.request_id.encode())]
        if origin is not None and ("*" in self._origins or origin.decode("latin-1") in self._origins):
            headers += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"x-request-id, x-session-id, x-policy-version, retry-after"),
                (b"vary", b"origin"),
            ]
        return headers


async def _receive_of_empty(read: dict[bytes, bytes], receive: Receive) -> Receive | None:
    """Return the function by which the app receives an empty body; None if there is a body.

    HTTP clients name a type of their own also for an empty body. The length of one in chunks, such as PHP's curl sends,
    is known once its first bytes or its end have arrived.
    """
    if b"transfer-encoding" not in read:
        return receive if read.get(b"content-length", b"0") == b"0" else None
    read_already = [await receive()]
    while read_already[0].get("more_body") and not read_already[0].get("body"):
        read_already = [await receive()]
    if read_already[0].get("body"):
        return None

    async def receive_again() -> Message:
        return read_already.pop() if read_already else await receive()

    return receive_again


def _check_query(query: bytes) -> None:
    num_parameters = query.count(b"&") + 1
    if num_parameters > MAX_QUERY_PARAMETERS:
        raise InvalidRequest(
            f"the request has {num_parameters} query parameters; at most {MAX_QUERY_PARAMETERS} are served",
            code="too_many_parameters",
        )


def _check_encoding(encodings: list[bytes]) -> None:
    encoding = b", ".join(each for each in encodings if each.lower() != IDENTITY)
    if encoding:
        raise UnsupportedMediaType(
            f"a body with the content-encoding {encoding.decode('latin-1')!r} is not accepted; send it uncompressed"
        )


class _Outgoing:
    """Sends a reply with more headers, and notes its status and size."""

    __slots__ = ("_headers", "_send", "num_bytes", "status")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.status: int | None = None
        self.num_bytes = 0

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers]
        else:
            self.num_bytes += len(message.get("body", b""))
        return self._send(message)


async def _answer_preflight(read: dict[bytes, bytes], send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", ALLOWED_METHODS),
        (b"access-control-allow-headers", read.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", PREFLIGHT_SECONDS),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
