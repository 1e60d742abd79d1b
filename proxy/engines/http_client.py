"""HTTP calls to one server: what is sent again, which silence is too long, and how calls on a lost server end.

aiohttp keeps the connections and reads HTTP. The rules of this proxy are here. A request is sent again only if the
server had closed a kept connection before the request arrived. A silence counts while a reader waits. And the calls on
a server that is gone end together. aiohttp's session is not used: its cookies, redirects and traces, of which no call
needs one, take a fifth of a whole reply's CPU. Nor are its requests: they send head and body in two packets.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import dataclasses
import errno
import functools
import math
import re
import select
import socket
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import SecretStr
from yarl import URL

from proxy.http.asgi import joined

STALE_SECONDS = 1.0
"""If a reused connection closes within this time after a request and without data, it is taken for one that the server
had closed before the request arrived, and the request is sent again."""
OVERDUE_SECONDS = 0.05
"""How long an answer is still awaited after the limit of silence: if this process was stopped meanwhile (SIGSTOP), data
may have arrived that it has not read yet."""
IDLE_SECONDS = 4.0
"""How long an idle connection may be reused: vLLM closes it after 5 s."""
BUFFERED_BYTES = 1 << 20
"""Bytes of an answer that are buffered for a slow reader before reading from the engine pauses."""
NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or a machine, that has too many open files."""
MAX_PREPARED = 64
"""Routes whose first lines are kept."""
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header may have: a line feed would begin another one."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Longest answer of a control route."""
KEEP_ALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""TCP probes a connection that was silent for 10 s each 5 s, and closes it after three probes without an answer, or
when sent data is unacknowledged for 25,000 ms."""


class Disconnected(Exception):
    """The connection failed, broke, or was silent for too long before the answer was complete."""


class Broken(Disconnected):
    """The connection was open and broke, as when the server is killed: it answers nothing more."""


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


class Answer(contextlib.AbstractContextManager["Answer"]):
    """The server's answer to one request: its head, and its body as it arrives.

    Leaving the `with` block before the body is complete closes the connection, so that the server stops its work.
    """

    def __init__(self, client: HttpClient, patience: float) -> None:
        self.status = 0
        self.content_type = ""
        self.is_new_connection = False
        """Whether the request did not reuse a connection."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        """How long the server may be silent, seconds."""
        self._started_at = self._waiting_since = self._loop.time()
        """When its reader began to wait for more of it; infinite while the reader does something else."""
        self._error: Disconnected | None = None
        """Why this side has ended the answer."""
        self._connection: aiohttp.connector.Connection | None = None
        self._content: aiohttp.StreamReader | None = None
        self._opening: asyncio.Task[Any] | None = None
        """The task that waits for the head."""
        self._timer = self._loop.call_later(patience, self._check)
        client.running.add(self)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._client.running.discard(self)
        if self._connection is not None:
            self._connection.close()  # does nothing if the body is complete, which has released it

    @property
    def num_seconds(self) -> float:
        return self._loop.time() - self._started_at

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
            Disconnected: the connection broke.
        """
        assert self._content is not None, "an answer has its head when its caller gets it"
        self._waiting_since = self._loop.time()
        try:
            part = await self._content.readany()
        except aiohttp.ClientError as error:
            raise (self._error or _broken(error)) from error
        finally:
            self._waiting_since = math.inf
        self._client.heard_at = self._loop.time()
        return part

    async def open(self, target: aiohttp.ClientRequest, head: bytes, body: bytes) -> None:
        """Send a request to a target, and wait for the head of its answer.

        Raises:
            aiohttp.ClientError, OSError: the connection was not opened, or broke.
            Disconnected: this side has ended the wait, or the answer is not HTTP.
        """
        self._opening = task = asyncio.current_task()
        assert task is not None, "a task sends the request"
        num_cancelled = task.cancelling()
        _opening.set(self)
        try:
            connection = self._connection = await self._client.connect(target)
            protocol = connection.protocol
            transport = None if protocol is None else protocol.transport
            if protocol is None or transport is None or transport.is_closing():
                raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
            protocol.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=BUFFERED_BYTES // 2)
            transport.writelines((head, body) if body else (head,))  # a TLS transport writes no empty part
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != HTTPStatus.SWITCHING_PROTOCOLS:
                message, content = await protocol.read()
        except HttpProcessingError as error:
            raise Disconnected(f"its answer is not valid HTTP: {error.message}") from error
        except asyncio.CancelledError:
            if self._error is None or task.uncancel() > num_cancelled:  # its caller is cancelled
                raise
            raise self._error from None
        finally:
            self._opening, self._waiting_since = None, math.inf
        self.status, self._content = message.code, content
        self.content_type = message.headers.get("content-type", "")
        self._client.heard_at = self._loop.time()
        content.on_eof(connection.release)

    def fail(self, error: Disconnected) -> None:
        """End the answer: its reader gets the error."""
        self._error = self._error or error
        if self._opening is not None:
            self._opening.cancel()
        elif self._connection is not None and self._content is not None:
            self._content.set_exception(aiohttp.ClientConnectionError("Connection closed"))
            self._connection.close()

    def _check(self, is_second: bool = False) -> None:
        """Fail the request if the server has been silent for too long while its answer is waited for."""
        silent = max(0.0, self._loop.time() - self._waiting_since)
        if silent < self._patience:
            self._timer = self._loop.call_later(self._patience - silent, self._check)
        elif not is_second:
            self._timer = self._loop.call_later(OVERDUE_SECONDS, self._check, True)
        else:
            self.fail(Disconnected(f"it sent nothing for {self._patience:g} s"))


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
        self._base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        self._tls = access.tls
        self._headers = {"content-type": "application/json"}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["authorization"] = f"Basic {base64.b64encode(secret).decode()}"
        elif access.bearer_key is not None:
            self._headers["authorization"] = f"Bearer {access.bearer_key.get_secret_value()}"
        self._timeout = aiohttp.ClientTimeout(connect=connect_seconds)
        self._silence_seconds = silence_seconds
        self._prepared = functools.lru_cache(MAX_PREPARED)(self._prepare)
        self._connector: aiohttp.TCPConnector | None = None
        """Opened by the first request, in its event loop."""
        self.running: set[Answer] = set()
        self.heard_at = -math.inf
        """When anything that the server has sent was read last, on the event loop's clock."""

    async def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        silence_seconds: float | None = None,
    ) -> Answer:
        """Send a request and return its answer once the head has arrived; use the answer in a `with` block.

        It is sent again once if its reused connection was closed by the server meanwhile.

        Raises:
            NotConnected: no connection could be opened.
            Disconnected: the connection broke before the answer's head, or the answer is a redirect.
        """
        fields = dict(self._headers)
        if body or method != "GET":
            fields["content-length"] = str(len(body))
        fields |= headers or {}
        if CONTROL.search("".join(fields.values())) is not None:
            raise NotConnected("a header of the request has a control character")
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        for is_last in (False, True):
            answer = Answer(self, silence_seconds or self._silence_seconds)
            try:
                target, first_lines = self._prepared(method, path)
                await answer.open(target, f"{first_lines}{lines}\r\n".encode(), body)
                break
            except BaseException as error:
                with answer:
                    if isinstance(error, Disconnected) or not isinstance(
                        error, aiohttp.ClientError | OSError | ValueError
                    ):
                        raise
                    if is_last or not _may_be_stale(answer, error):
                        raise self._translated(error) from error
        if answer.status < 200:
            with answer:
                raise Disconnected("its answer is not valid HTTP: it switches the protocol")
        if 300 <= answer.status < 400:
            with answer:
                raise Disconnected(f"it redirects ({answer.status}); set the address that it redirects to")
        return answer

    def _prepare(self, method: str, path: str) -> tuple[aiohttp.ClientRequest, str]:
        """Return what aiohttp opens a connection for, and the lines of a request that name its target."""
        url, tls = URL(self._base + path, encoded=True), True if self._tls is None else self._tls
        target = aiohttp.ClientRequest(method, url, loop=asyncio.get_running_loop(), ssl=tls)
        return target, f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {target.headers['host']}\r\n"

    def _translated(self, error: Exception) -> Disconnected:
        match error:
            case TimeoutError():
                return NotConnected(f"no connection within {self._timeout.connect:g} s")
            case aiohttp.ClientConnectorError():
                return NotConnected(str(error.os_error) or type(error).__name__, error.os_error.errno)
            case aiohttp.ClientSSLError() | ValueError():  # an impossible host name is a ValueError
                return NotConnected(str(error) or type(error).__name__)
        return _broken(error)

    async def connect(self, request: aiohttp.ClientRequest) -> aiohttp.connector.Connection:
        """Return an idle connection that is open and has sent all of its earlier request, or a new one.

        Raises:
            aiohttp.ClientError, OSError: no connection could be opened.
        """
        if self._connector is None:
            self._connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_open_socket)
        while True:
            connection = await self._connector.connect(request, [], self._timeout)
            if (transport := connection.transport) is None:
                return connection
            polled = select.poll()  # a busy event loop may not have read yet that the server has closed it
            polled.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
            if not (transport.get_write_buffer_size() or polled.poll(0)):
                return connection
            connection.close()  # the server answered before it had read the body, or has closed the connection

    async def close(self) -> None:
        if self._connector is not None:
            await self._connector.close()

    def abort_requests(self, reason: str) -> None:
        for answer in list(self.running):
            answer.fail(Broken(reason))


_opening: contextvars.ContextVar[Answer] = contextvars.ContextVar("_opening")
"""The request that this task sends; aiohttp does not tell whether it reuses a connection."""


def _open_socket(address: Any) -> socket.socket:
    """Return a socket on which TCP notices a vanished host."""
    _opening.get().is_new_connection = True
    opened = socket.socket(*address[:3])
    opened.setblocking(False)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE_OPTIONS.items():
        if hasattr(socket, name):  # Linux has all of them
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


def _may_be_stale(answer: Answer, error: Exception) -> bool:
    """Return whether the server had closed a reused connection before a request arrived: it has sent nothing."""
    if answer.is_new_connection or answer.num_seconds >= STALE_SECONDS:
        return False
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # otherwise it is the begin of an answer
    return isinstance(error, aiohttp.ClientOSError) and not isinstance(error, aiohttp.ClientConnectorError)


def _broken(error: Exception) -> Broken:
    return Broken(str(error) if isinstance(error, aiohttp.ClientOSError) else "the server closed the connection")
