"""HTTP/1.1 to one server over connections that are kept open: no more than a call to an engine needs.

One decision: the parser is httptools, which the server uses as well, and around it stands only what a call to vLLM
needs; `bench/proxy.py` shows what that saves over a client for all of HTTP. No redirects, cookies, compression or
pipelining: an engine has none of them.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import httptools

BUFFERED_BYTES = 1 << 20
"""How much of an answer is kept for a slow reader before the engine has to wait."""

STALE_SECONDS = 1.0
"""A kept connection that ends so soon after a request, without a word, had ended before the request reached it."""
KEPT_SECONDS = 15.0
"""How long an idle connection is good for another request; whatever lies in between may have forgotten an older one."""


class Disconnected(Exception):
    """No connection, or one that broke or fell silent before the answer was whole."""


class HttpClient:
    """The connections to one server; as many as there are requests at once.

    Args:
        url: `http://` or `https://`, with a path that is put before every other if it has one.
        connect_seconds: How long a new connection may take.
        silence_seconds: How long the server may say nothing while a request is with it, unless the request says more.
    """

    def __init__(self, url: str, *, connect_seconds: float, silence_seconds: float) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = f"host: {parts.netloc.rpartition('@')[2]}\r\n"
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._head += f"authorization: Basic {base64.b64encode(secret).decode()}\r\n"
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._idle: list[_Connection] = []

    async def request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, silence_seconds: float | None = None
    ) -> Answer:
        """Send a request, and return its answer as soon as its head is there; use it in a `with` block.

        A connection that was kept open and that the server had closed by then is replaced, once.

        Raises:
            Disconnected: no connection, one that broke before the answer's head, or a redirect.
        """
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{lines}content-length: {len(body)}\r\n\r\n"
        sent = head.encode("latin-1") + body
        answer = await self._exchange(sent, silence_seconds or self._silence_seconds)
        if 300 <= answer.status < 400:
            with answer:
                raise Disconnected(f"it redirects ({answer.status}); give the address that it redirects to")
        return answer

    async def _exchange(self, sent: bytes, patience: float) -> Answer:
        kept = self._kept()
        if kept is not None:
            try:
                return await kept.exchange(sent, patience)
            except _Stale:
                pass
        return await (await self._connect()).exchange(sent, patience)

    def _kept(self) -> _Connection | None:
        """Return the connection that has idled for the shortest time; none if that is too long, and drop them all."""
        if not self._idle:
            return None
        newest = self._idle.pop()
        if newest.is_fresh():
            return newest
        newest.abort()
        self.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle), self._host, self._port, ssl=self._tls
                )
        except TimeoutError as error:
            raise Disconnected(f"no connection within {self._connect_seconds:g} s") from error
        except (OSError, ValueError) as error:  # a name that cannot be one is a ValueError
            raise Disconnected(str(error) or type(error).__name__) from error
        return connection

    def close(self) -> None:
        """Close the connections that no request is on."""
        for connection in list(self._idle):
            connection.abort()


class Answer:
    """What the server answers to one request: its head, and its body as it comes.

    Leaving its `with` block before it is whole closes the connection, so that the server stops its work.
    """

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self._connection = connection
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_whole = False
        self._error: Disconnected | None = None
        self._awaited: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_whole:
            self._connection.abort()

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            Disconnected: it broke off.
        """
        parts = [part async for part in self.parts()]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield what has come since the last time, as soon as there is something, until the body is whole.

        Raises:
            Disconnected: it broke off; all that came before has been yielded.
        """
        while True:
            if self._parts:
                yield self._take()
            elif self._is_whole:
                return
            else:
                await self.news()

    async def news(self) -> None:
        """Wait until something has come.

        Raises:
            Disconnected: nothing more will.
        """
        if self._error is not None:
            raise self._error
        self._awaited = asyncio.get_running_loop().create_future()
        try:
            await self._awaited
        finally:
            self._awaited = None

    def has_come(self, part: bytes) -> bool:
        """Take a part of the body, and say whether the reader is too far behind to get more."""
        self._parts.append(part)
        self._num_bytes += len(part)
        self.tell()
        return self._num_bytes > BUFFERED_BYTES

    def end(self, error: Disconnected | None = None) -> None:
        """Take the body's end, or what keeps it from coming."""
        self._is_whole, self._error = error is None, error
        if error is None or self._awaited is None:
            self.tell()
        elif not self._awaited.done():
            self._awaited.set_exception(error)

    def tell(self) -> None:
        """Wake who waits for news."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    def _take(self) -> bytes:
        parts, self._parts = self._parts, []
        self._num_bytes = 0
        if not self._is_whole:
            self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Stale(Disconnected):
    """A connection that had been kept open was closed before it said anything."""


class _Connection(asyncio.Protocol):
    """One connection; it carries one request at a time, and goes back among the idle ones by itself."""

    _transport: asyncio.Transport

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._patience = 0.0
        """How long the server may be silent, seconds."""
        self._heard_at = 0.0
        self._answer: Answer | None = None
        self._is_paused = False
        self._may_be_stale = False
        """Whether it was kept open for this request, and has said nothing since."""
        self._has_length = False
        """Whether the answer says where it ends; another ends with the connection."""

    def is_fresh(self) -> bool:
        """Say whether it has not idled for long."""
        return self._loop.time() - self._heard_at < KEPT_SECONDS

    async def exchange(self, request: bytes, patience: float) -> Answer:
        """Send a request and wait for the head of its answer."""
        self._heard_at = self._loop.time()
        if self._timer is not None and patience < self._patience:
            self._timer.cancel()
            self._timer = None
        self._patience = patience
        if self._timer is None:
            self._timer = self._loop.call_later(patience, self._check)
        self._has_length = False
        answer = self._answer = Answer(self)
        if self._transport.is_closing():
            raise _Stale("the server had closed the connection")
        self._transport.write(request)
        try:
            while not answer.status:
                await answer.news()
        except BaseException:
            if self._answer is answer:  # it may be whole by now, and the connection another's
                self.abort()
            raise
        return answer

    def abort(self) -> None:
        """Close at once, whatever is on its way."""
        self._transport.abort()

    def resume(self) -> None:
        """Let the server say more."""
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the new connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take what the server says."""
        self._heard_at = self._loop.time()
        self._may_be_stale = False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(Disconnected(f"it answered no HTTP that was asked for: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request, if one is on its way, and stop being idle."""
        if self._timer is not None:
            self._timer.cancel()
        if self in self._idle:
            self._idle.remove(self)
        answer = self._answer
        if answer is None:
            return
        if answer.status and not self._has_length and exc is None:
            self._answer = None
            answer.end()
        elif self._may_be_stale and self._loop.time() - self._heard_at < STALE_SECONDS:
            self._fail(_Stale("the server closed the connection"))
        else:
            self._fail(Disconnected(str(exc or "the server closed the connection")))

    def on_message_begin(self) -> None:
        """Take the beginning of an answer; to what was not asked, nobody listens."""
        if self._answer is None:
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002  the parser's signature
        """Take a header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Take the head; one of 1xx says that another will follow."""
        status = self._parser.get_status_code()
        if self._answer is not None and status >= 200:
            self._answer.status = status
            self._answer.tell()

    def on_body(self, part: bytes) -> None:
        """Take a part of the body."""
        if self._answer is not None and self._answer.has_come(part) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Take the end of an answer; the connection may carry the next one."""
        answer = self._answer
        if answer is None or not answer.status:
            return
        self._answer = None
        answer.end()
        self.resume()
        if self._parser.should_keep_alive():
            self._may_be_stale = True
            self._idle.append(self)
        else:
            self._transport.close()

    def _check(self) -> None:
        """Give up a server that has been silent for too long; a timer per call would cost more."""
        self._timer = None
        if self._answer is None:
            return
        silent = 0.0 if self._is_paused else self._loop.time() - self._heard_at  # paused, it is we who do not listen
        if silent >= self._patience:
            self._fail(Disconnected(f"it said nothing for {self._patience:g} s"))
        else:
            self._timer = self._loop.call_later(self._patience - silent, self._check)

    def _fail(self, error: Disconnected) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(error)
        self.abort()
