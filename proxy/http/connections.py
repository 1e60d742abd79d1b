"""A client's connection: limits of time and size, a client that stops reading or leaves; on uvicorn's protocol.

One timer per connection runs while a request is incomplete, so the same rule applies to an incomplete request line,
incomplete headers and an incomplete body. A request that arrives as a whole needs none. A second timer runs while the
client does not read its reply. The head of a reply leaves with the first part of its body: a system call costs as much
as the whole of the parsing.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.http import problems
from proxy.settings import ProxySettings
from turnwise.telemetry.requests import make_context

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

LEFT = "turnwise.left"
"""Name of the scope's extension with a future that is done when the client has closed its connection."""
CLOSING = "turnwise.closing"
"""Name of the scope's extension with a future that is done when the server stops: a reply without an end ends then."""
MAX_HEAD_BYTES = 64 * 2**10
"""Longest head of a request: its line and its headers."""
LINE_BYTES = 4
"""Bytes of a header line in addition to name and value."""
COPIED_BYTES = 64 * 2**10
"""A shorter part of a body is sent in one piece with the head."""
UPGRADE = b"upgrade"
"""Header by which a client offers another protocol, as the JDK's `HttpClient` offers HTTP/2 in each first request."""
SERVED_VERSION = "1.1"
SPACES = b" \t"
HOST = re.compile(rb"(?:[a-z0-9._~!$&'()*+;=%-]+|\[[a-f0-9:.]+\])(?::[0-9]*)?", re.IGNORECASE)
"""A host and perhaps its port, without a user (RFC 9110, 7.2)."""
Refusal = tuple[HTTPStatus, str, str]
"""Status, code and message."""
MAX_LOGGED = 2048
"""Characters of a refused request's path in the access log."""
INTERIM = b"HTTP/1.1 1"
"""Begin of `100 Continue`, which the client waits for."""


class RefusedHead(NamedTuple):
    """A request that was answered before the app saw it."""

    request_id: str
    client: str | None
    method: str | None
    path: str | None
    """Without its query; None, as the method, where its line was not read."""
    status: int
    num_bytes: int


class ReplyTransport:
    """Sends the head of one reply together with the first part of its body, if that comes at once."""

    __slots__ = ("_head", "_is_begun", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        """The head while it waits for the body."""
        self._is_begun = False

    def write(self, data: bytes) -> None:
        """Send data; hold the first, which is the head, for the rest of this round of the event loop."""
        if self._is_begun or data.startswith(INTERIM):
            head, self._head = self._head, b""
            if head and len(data) > COPIED_BYTES:
                self._transport.write(head)
            elif head:
                data = head + data
            self._transport.write(data)
        else:
            self._is_begun, self._head = True, data
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self.write(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection; a reply without a body is sent first."""
        self._flush()
        self._transport.close()


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol under limits."""

    def __init__(
        self,
        settings: ProxySettings,
        count_refusal: Callable[[str], None],
        log_head: Callable[[RefusedHead], None],
        hand_over: Callable[[asyncio.Transport, bytes], bool] | None,
        *,
        first_data: bytes = b"",
        **of_uvicorn: Any,
    ) -> None:
        """Prepare for a connection.

        Args:
            settings: The limits: of the time until a request is complete, of the size of its line and headers, and of
                the time in which a client reads nothing of its reply.
            count_refusal: Counts a connection that is refused or closed, by the code of the reason.
            log_head: Gets each request that the app never sees.
            hand_over: Hands the connection to another process between two requests, with the first bytes of the next
                one; returns whether that took it. None serves all requests here.
            first_data: What another process has read from the connection before it handed it over.
            of_uvicorn: The arguments of uvicorn's own protocol.
        """
        super().__init__(**of_uvicorn)
        self._settings = settings
        self._count_refusal = count_refusal
        self._log_head = log_head
        self._is_handed = False
        """Whether the app has the request."""
        self.url = b""  # of a connection without any request, which is closed after a while
        self._hand_over = hand_over
        self._first_data = first_data
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._is_whole = False
        """Whether no request is incomplete."""
        self._head_bytes = 0
        """Bytes of an incomplete head, without the chunk of data in which it began."""
        self._left = self.loop.create_future()
        self._closing = self.loop.create_future()
        self._refusal = (HTTPStatus.BAD_REQUEST, "invalid_http", "the data is not an HTTP/1.1 request; send one")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up a new connection."""
        super().connection_made(transport)
        self._arm()
        if self._first_data:
            data, self._first_data = self._first_data, b""
            self._parse(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and signal the call that runs on the connection."""
        self._disarm()
        self._stop_stall_timer()
        self._left.set_result(None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close the connection once its reply is complete; tell the reply that the server stops."""
        if not self._closing.done():
            self._closing.set_result(None)
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_stall_timer()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _start_stall_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._settings.client_stall_seconds, self._check_stall, unread)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _check_stall(self, unread: int) -> None:
        """Disconnect a client that has read nothing since the timer started."""
        if self.transport.get_write_buffer_size() < unread:
            self._start_stall_timer()
        else:
            self._count_refusal("client_stalled")
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless another process takes the connection."""
        if self._hand_over is not None and self._is_between_requests() and self._hand_over(self.transport, data):
            self._unset_keepalive_if_required()
            self.transport.abort()  # closes this process's descriptor: the connection itself stays open
        else:
            self._parse(data)

    def _is_between_requests(self) -> bool:
        """Return whether no request has begun, or the last one is answered and its answer is sent."""
        if self.cycle is None:
            is_between = not self._in_head
        else:
            is_between = self._is_whole and self.cycle.response_complete and not self.pipeline
        return is_between and self.scheme == "http" and not self.transport.get_write_buffer_size()

    def _parse(self, data: bytes) -> None:
        """Parse received data; close the connection if its head is too long."""
        began_before = self._in_head
        self._unset_keepalive_if_required()
        try:
            while (again := self._feed(data)) is not None:
                data = again
        except httptools.HttpParserError:
            self._refuse(*self._refusal)
        if not self._is_whole and not self.transport.is_closing():
            self._arm()
        if began_before and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(*self._too_long())

    def _feed(self, data: bytes) -> bytes | None:
        """Parse data; return what has to be parsed again, None if nothing has.

        A request that offers another protocol is parsed again without its offer, so that it is served with its body:
        the parser takes what follows the head for the other protocol's.

        Raises:
            HttpParserError: it is no request that the proxy serves.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            kept = [(name, value) for name, value in self.headers if name != UPGRADE]
            if len(kept) == len(self.headers):  # parsed again, it would stop at the same place
                raise httptools.HttpParserError("the request offers a protocol in no header") from upgrade
            lines = b"".join(b"%s: %s\r\n" % header for header in kept)
            head = b"%s %s HTTP/1.1\r\n%s\r\n" % (self.parser.get_method(), self.url, lines)
            self.parser = httptools.HttpRequestParser(self)
            return head + data[upgrade.args[0] :]
        return None

    def _offers_upgrade(self) -> bool:
        return any(name == UPGRADE for name, _ in self.headers)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {LEFT: self._left, CLOSING: self._closing}  # type: ignore[dict-item]  # within the process it may be any object
        self._in_head, self._is_whole, self._is_handed, self._head_bytes = True, False, False, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; ignore trailers, which would replace headers that a server in front has checked."""
        if self._in_head:
            super().on_header(name, value.rstrip(SPACES))  # the parser leaves them

    def on_headers_complete(self) -> None:
        """Check a complete head."""
        self._in_head = False
        refusal = self._check_head()
        if refusal is not None:
            self._refusal = refusal
            raise ValueError(refusal[2])  # the parser converts it into its own error, and that into a reply
        self._is_handed = True
        if not (self.parser.should_upgrade() and self._offers_upgrade()):
            super().on_headers_complete()

    def _check_head(self) -> Refusal | None:
        """Return why a request is refused by its head alone, None if it is not."""
        num_header_bytes = sum(map(len, itertools.chain.from_iterable(self.headers)))
        if len(self.url) + num_header_bytes + LINE_BYTES * len(self.headers) > MAX_HEAD_BYTES:
            return self._too_long()
        version, method = self.parser.get_http_version(), self.parser.get_method()
        if version != SERVED_VERSION:
            message = f"HTTP/{version} is not served; send HTTP/1.1 (behind nginx: `proxy_http_version 1.1`)"
            return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "http_version_not_served", message
        if method == b"CONNECT":
            message = "CONNECT is not served, because this server is no proxy for other hosts; call it by its own URL"
            return HTTPStatus.NOT_IMPLEMENTED, "method_not_served", message
        return self._check_host() or self._check_coding() or self._check_websocket(method)

    def _check_host(self) -> Refusal | None:
        """Return why the request's host is refused, None if there is one (RFC 9112, 3.2)."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
            given = b", ".join(hosts).decode("latin-1")
            message = f"a request must have one header `host` with a host and perhaps a port, not {given!r}"
            return HTTPStatus.BAD_REQUEST, "invalid_host", message
        _, has_authority, rest = self.url.partition(b"://")
        if self.url.startswith(b"/") or not has_authority:
            return None
        authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
        if authority.lower() == hosts[0].lower():
            return None
        message = (
            f"the host in the request's line, {authority.decode('latin-1')!r}, must be the one of its header `host`"
        )
        return HTTPStatus.BAD_REQUEST, "invalid_host", f"{message}, {hosts[0].decode('latin-1')!r}"

    def _check_coding(self) -> Refusal | None:
        """Return why the body's transfer coding is refused, None if it is none, or chunks alone (RFC 9112, 6.1)."""
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings in ([], [b"chunked"]):
            return None
        given = b", ".join(codings).decode("latin-1")
        message = f"the transfer-encoding {given!r} is not served; send chunks alone, or a content-length"
        return HTTPStatus.NOT_IMPLEMENTED, "transfer_encoding_not_served", message

    def _check_websocket(self, method: bytes) -> Refusal | None:
        """Return why the opening of a WebSocket is refused, None if it is none; 426 makes clients use plain HTTP."""
        if method != b"GET" or not self.parser.should_upgrade():
            return None
        offered = b",".join(value for name, value in self.headers if name == UPGRADE)
        if b"websocket" not in [protocol.strip().lower() for protocol in offered.split(b",")]:
            return None
        message = "WebSockets are not served; send the request as a POST of HTTP/1.1, whose reply may be a stream"
        return HTTPStatus.UPGRADE_REQUIRED, "websocket_not_served", message

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        if self.parser.should_upgrade() and self._offers_upgrade():
            return
        self._is_whole = True
        self._disarm()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        cycle.transport = ReplyTransport(self.transport, self.loop)  # type: ignore[assignment]  # has all that a cycle calls
        super()._start_asgi_task(cycle, app)

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._settings.header_timeout_seconds, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            self._arm()  # the previous request is still being answered; its reply continues
            return
        if self.transport.is_closing():
            return
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
            return
        message = f"the request was not complete within {self._settings.header_timeout_seconds:g} s; send it again"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", message)

    def _too_long(self) -> Refusal:
        message = f"the request's line and headers are longer than {MAX_HEAD_BYTES} bytes, which is the limit"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", message

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        self._count_refusal(code)
        body = orjson.dumps(problems.body(message, "invalid_request_error", code))
        request_id = make_context("", "").request_id
        if not self._is_handed:
            method, path = (self.parser.get_method(), self.url.partition(b"?")[0]) if self.url else (b"", b"")
            client = self.client[0] if self.client else None
            named, asked = (each.decode("latin-1")[:MAX_LOGGED] or None for each in (method, path))
            self._log_head(RefusedHead(request_id, client, named, asked, status.value, len(body)))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"x-request-id: {request_id}\r\n"
        if status is HTTPStatus.UPGRADE_REQUIRED:
            head += "upgrade: HTTP/1.1\r\nconnection: upgrade\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
