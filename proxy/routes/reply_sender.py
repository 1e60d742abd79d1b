"""Endpoints of the data plane, and their replies: whole, streamed, or an error in the dialect's own shape."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from proxy.dialects.base import Call, Dialect, WireRoute
from proxy.http import problems
from proxy.http.asgi import JSON, send_whole
from turnwise.errors import TurnwiseError

if TYPE_CHECKING:
    from proxy.services import Services

log = logging.getLogger(__name__)

MIN_CHECK_SECONDS = 0.01


class ReplySender:
    """One reply: it knows whether its head has been sent, and so how an error can still be reported."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self.dialect = dialect
        self._started = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None
        self.call: Call
        """The call, set once it is read; its encoder writes the events, and the error at the end of a failed stream."""
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []

    async def whole(self, body: bytes, *, status: int = 200, content_type: bytes = JSON) -> None:
        self._started = True
        await send_whole(self._send, status, body, self.headers, content_type)

    async def part(self, data: bytes, *, is_last: bool = False) -> None:
        if data is not self.call.encoder.keep_alive:
            self.parts.append(data)
        self._sent_at = self._loop.time()
        if not self._started:
            self._started = True
            headers = [(b"content-type", self.call.encoder.content_type.encode()), (b"cache-control", b"no-cache")]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    @contextlib.contextmanager
    def kept_alive(self, seconds: float) -> Iterator[None]:
        """Send what clients ignore whenever a stream has been silent in the block for this time.

        One timer runs for the whole stream. It calls a method: a closure that names itself would keep the events of
        every stream in memory until the next garbage collection.
        """
        if seconds <= 0:
            yield
            return
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._comment_if_silent, seconds)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._commenting is not None:
                self._commenting.cancel()

    def _comment_if_silent(self, seconds: float) -> None:
        silent = self._loop.time() - self._sent_at
        if silent >= seconds and (self._commenting is None or self._commenting.done()):
            self._commenting = self._loop.create_task(self.part(self.call.encoder.keep_alive))
            self._sent_at, silent = self._loop.time(), 0.0
        self._timer = self._loop.call_later(max(seconds - silent, MIN_CHECK_SECONDS), self._comment_if_silent, seconds)

    async def fail(self, error: Exception, services: Services) -> None:
        """Report an error: as the status, or as the last event of a stream that has started. Log an unexpected one."""
        if not isinstance(error, TurnwiseError):
            log.error("a call failed with an unexpected error", exc_info=error)
            error = problems.UNEXPECTED
        status, body, headers = problems.answer(error)
        services.metrics.refused.labels(problems.code_of(error)).inc()
        if not self._started:
            await send_whole(self._send, status, self.dialect.encode_error(status, body), headers)
            return
        await self.part(self.call.encoder.error(body), is_last=True)


class Endpoint(abc.ABC):
    """One endpoint of a dialect. It is plain ASGI; whatever it raises is reported in the dialect's shape."""

    def __init__(self, services: Services, dialect: Dialect, route: WireRoute) -> None:
        self._services = services
        self._dialect = dialect
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = ReplySender(send, self._dialect)
        try:
            await self.serve(scope, receive, reply)
        except Exception as error:  # noqa: BLE001  the request's outermost edge: the client must get an answer
            await reply.fail(error, self._services)

    @abc.abstractmethod
    async def serve(self, scope: Scope, receive: Receive, reply: ReplySender) -> None: ...
