"""An HTTP/1.1 client for one server over persistent connections, with only the features that calls to vLLM need.

The parser is httptools, which the server uses as well. Redirects, cookies, compression and pipelining are left out,
because an engine has none of them; `bench/engine_client.py` measures what that saves over aiohttp's client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import errno
import math
import socket
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import httptools
from pydantic import SecretStr

from proxy.http.asgi import joined

STALE_SECONDS = 1.0
"""If a reused connection closes within this time after a request and without data, it is taken for one that the server
had closed before the request arrived, and the request is sent again."""
OVERDUE_SECONDS = 0.05
"""How long an answer is still awaited after the limit of silence: if this process was stopped meanwhile (SIGSTOP), data
may have arrived that it has not read yet."""
IDLE_SECONDS = 15.0
"""How long an idle connection may be reused; a network device in between may have dropped an older one."""
BUFFERED_BYTES = 1 << 20
"""Bytes of an answer that are buffered for a slow reader before reading from the engine pauses."""
NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or a machine, that has too many open files."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Longest answer of a control route."""


class Disconnected(Exception):
    """The connection failed, broke, or was silent for too long before the answer was complete."""


class AnswerTooLong(Disconnected):
    """The server sent more than the client reads."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"its answer is longer than {max_bytes} bytes, which is the limit")


class NotConnected(Disconnected):
    """No connection could be opened; nothing was sent."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.is_refused = number == errno.ECONNREFUSED
        """Whether the host answered that nothing listens on the port."""
        self.is_local = number in NO_FILES
        """Whether this process may open no further connection, which says nothing about the server."""


class Answer:
    """The server's answer to one request: its head, and its body as it arrives.

    Leaving the `with` block before the body is complete closes the connection, so that the server stops its work.
    """

    __slots__ = ("_error", "_leave", "_loop", "body", "content_type", "head", "is_complete", "status", "waiting_since")

    def __init__(
        self, leave: Callable[[], None], transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.status = 0
        self.content_type = ""
        self.head: asyncio.Future[None] = loop.create_future()
        """Done once the status is known, or the connection is lost."""
        self.body = asyncio.StreamReader(BUFFERED_BYTES // 2, loop)
        """What has arrived and was not read; it pauses the transport while it holds `BUFFERED_BYTES`."""
        self.body.set_transport(transport)
        self.is_complete = False
        self.waiting_since = loop.time()
        """When its reader began to wait for more of it; infinite while the reader does something else."""
        self._loop = loop
        self._leave = leave
        """Keeps the connection for the next request, or closes it if the answer is not complete."""
        self._error: Disconnected | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    async def read(self, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """Return the whole body.

        Raises:
            Disconnected: the connection broke before its end.
            AnswerTooLong: it has more than `max_bytes`; the rest is not read.
        """
        parts: list[bytes] = []
        num_bytes = 0
        while part := await self.next_part():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise AnswerTooLong(max_bytes)
            parts.append(part)
        return parts[0] if len(parts) == 1 else await joined(parts, num_bytes)

    async def next_part(self) -> bytes:
        """Return the data that has arrived since the last part, at least one byte; nothing once the body is complete.

        Raises:
            Disconnected: the connection broke; all data before that has been returned.
        """
        self.waiting_since = self._loop.time()
        part = await self.body.read(BUFFERED_BYTES)
        self.waiting_since = math.inf
        if not part and self._error is not None:
            raise self._error
        return part

    def end(self, error: Disconnected | None = None) -> None:
        """End the body, or fail it with an error."""
        self.is_complete, self._error = error is None, error
        self.body.feed_eof()
        if error is not None and not self.head.done():
            self.head.set_exception(error)


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """How a client proves itself to a server, and which servers it trusts."""

    bearer_key: SecretStr | None = None
    """Sent as `Authorization: Bearer`, unless the URL has a user and password."""
    tls: ssl.SSLContext | None = None
    """For `https://`; None takes the system's authorities and no client certificate."""


class HttpClient:
    """The connections to one server, one for each concurrent request.

    Args:
        url: `http://` or `https://`, with an optional path that prefixes every request's path.
        connect_seconds: How long a new connection may take.
        silence_seconds: How long the server may send nothing during a request, unless the request sets its own limit.
    """

    def __init__(
        self, url: str, *, connect_seconds: float, silence_seconds: float, access: Access | None = None
    ) -> None:
        parts = urlsplit(url)
        access = access or Access()
        self._tls = (access.tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._head += f"authorization: Basic {base64.b64encode(secret).decode()}\r\n"
        elif access.bearer_key is not None:
            self._head += f"authorization: Bearer {access.bearer_key.get_secret_value()}\r\n"
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, silence_seconds: float | None = None
    ) -> Answer:
        """Send a request and return its answer once the head has arrived; use the answer in a `with` block.

        A reused connection that the server has closed meanwhile is replaced once.

        Raises:
            NotConnected: no connection could be opened.
            Disconnected: the connection broke before the answer's head, or the answer is a redirect.
        """
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{lines}content-length: {len(body)}\r\n\r\n"
        sent = (head.encode("latin-1"), body)
        patience = silence_seconds or self._silence_seconds
        connection, answer = self._take_idle(), None
        if connection is not None:
            with contextlib.suppress(_Stale):
                answer = await connection.exchange(sent, patience)
        if answer is None:
            answer = await (await self._connect()).exchange(sent, patience)
        if 300 <= answer.status < 400:
            with answer:
                raise Disconnected(f"it redirects ({answer.status}); set the address that it redirects to")
        return answer

    def _take_idle(self) -> _Connection | None:
        """Return the most recently used idle connection; if even that is too old, close all and return None."""
        if not self._idle:
            return None
        newest = self._idle.pop()
        if asyncio.get_running_loop().time() - newest.heard_at < IDLE_SECONDS:
            return newest
        newest.abort()
        self.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle, self._open), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise NotConnected(f"no connection within {self._connect_seconds:g} s") from error
        except (OSError, ValueError) as error:  # an impossible host name is a ValueError
            raise NotConnected(str(error) or type(error).__name__, getattr(error, "errno", None)) from error
        return connection

    def close(self) -> None:
        """Close idle connections."""
        for connection in list(self._idle):
            connection.abort()

    def has_heard(self, since: float) -> bool:
        """Return whether the server has sent anything since this instant of the event loop's clock."""
        return any(connection.heard_at >= since for connection in self._open)

    def abort_requests(self, reason: str) -> None:
        for connection in list(self._open):
            connection.fail(Disconnected(reason))


KEEP_ALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""TCP probes a connection that was silent for 10 s each 5 s, and closes it after three probes without an answer, or
when sent data is unacknowledged for 25,000 ms."""


def set_keep_alive(transport: asyncio.BaseTransport) -> None:
    """Set TCP keep-alive and a limit for unacknowledged data, so that a vanished host is noticed."""
    given = transport.get_extra_info("socket")
    if given is None or given.family not in (socket.AF_INET, socket.AF_INET6):
        return
    same = socket.socket(fileno=given.fileno())  # uvloop's own object for it has no setsockopt
    try:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE_OPTIONS.items():
            if hasattr(socket, name):  # Linux has all of them
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    finally:
        same.detach()  # the descriptor remains the transport's


class _Stale(Disconnected):
    """A reused connection was closed before it sent anything."""


class _Connection(asyncio.Protocol):
    """One connection; it carries one request at a time."""

    _transport: asyncio.Transport

    def __init__(self, idle: list[_Connection], opened: set[_Connection]) -> None:
        self._idle = idle
        self._open = opened
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._patience = 0.0
        """How long the server may be silent, seconds."""
        self.heard_at = 0.0
        """When the server was heard last."""
        self._answer: Answer | None = None
        self._is_kept = False
        """Whether the server keeps the connection after its answer."""
        self._may_be_stale = False
        """Whether it was reused for this request and has received nothing since."""
        self._has_length = False
        """Whether the answer declares its length; otherwise it ends with the connection."""

    async def exchange(self, request: tuple[bytes, bytes], patience: float) -> Answer:
        """Send the head and the body of a request; return the answer once its head has arrived."""
        if self._transport.is_closing():
            raise _Stale("the server had closed the connection")
        self._open.add(self)  # not before: uvloop does not report the end of a connection whose opening was cancelled
        self._has_length, self._patience = False, patience
        self._timer = self._loop.call_later(patience, self._check)
        answer = self._answer = Answer(self.leave, self._transport, self._loop)
        self._transport.writelines(request)
        try:
            await answer.head
        except BaseException:
            self.leave()
            raise
        return answer

    def leave(self) -> None:
        """Keep the connection for the next request, or close it if the answer is not complete."""
        answer, self._answer = self._answer, None
        if self._timer is not None:
            self._timer.cancel()
        is_over = answer is not None and answer.is_complete and not self._transport.get_write_buffer_size()
        if is_over and self._is_kept and not self._transport.is_closing():
            self._transport.resume_reading()
            self._may_be_stale = True
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        set_keep_alive(transport)

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        self.heard_at = self._loop.time()
        self._may_be_stale = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Disconnected(f"its answer is not valid HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the running request, if there is one, and leave the idle connections."""
        self._open.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        if self._answer is not None and self._answer.status and not self._has_length and exc is None:
            self._answer.end()
        elif self._answer and self._may_be_stale and self._loop.time() - self._answer.waiting_since < STALE_SECONDS:
            self.fail(_Stale("the server closed the connection"))
        else:
            self.fail(Disconnected(str(exc or "the server closed the connection")))

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.is_complete:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the content type, and whether a header declares the length."""
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._has_length = True
        elif lowered == b"content-type" and self._answer is not None:
            self._answer.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Publish the status; after a 1xx head another head follows."""
        status = self._parser.get_status_code()
        if self._answer is not None and status >= 200 and not self._answer.head.done():
            self._answer.status = status
            self._answer.waiting_since = math.inf
            self._answer.head.set_result(None)

    def on_body(self, part: bytes) -> None:
        if self._answer is not None and not self._answer.is_complete:
            self._answer.body.feed_data(part)

    def on_message_complete(self) -> None:
        """End an answer; after a 1xx head another one follows."""
        if self._answer is not None and self._answer.status:
            self._is_kept = self._parser.should_keep_alive()
            self._answer.end()

    def _check(self, is_second: bool = False) -> None:
        """Fail the request if the server has been silent for too long while its answer is waited for."""
        if self._answer is None or self._answer.is_complete:
            return
        silent = max(0.0, self._loop.time() - max(self.heard_at, self._answer.waiting_since))
        if silent < self._patience:
            self._timer = self._loop.call_later(self._patience - silent, self._check)
        elif not is_second:
            self._timer = self._loop.call_later(OVERDUE_SECONDS, self._check, True)
        else:
            self.fail(Disconnected(f"it sent nothing for {self._patience:g} s"))

    def fail(self, error: Disconnected) -> None:
        """Fail the running request, if there is one, and close the connection."""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.is_complete:
            answer.end(error)
        self.abort()
