"""Send one reply of the data plane: whole, streamed, or as an error in the dialect's own shape."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from proxy.dialects.base import Call, Dialect, Encoder
from proxy.dialects.sse import Verbatim
from proxy.http import problems
from proxy.http.asgi import Send, send_whole
from turnwise.errors import TurnwiseError

if TYPE_CHECKING:
    from proxy.services import Services


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every client of server-sent events ignores."""
MIN_CHECK_SECONDS = 0.01


class ReplySender:
    """One reply: it knows whether its head has been sent, and so how an error can still be reported."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._started = False
        self._loop = asyncio.get_running_loop()
        self._sent_at = 0.0
        self.call: Call | None = None
        """The call, once it is read; its encoder writes the error event at the end of a failed stream."""
        self.headers: dict[str, str] = {}
        """Extra headers of a successful reply."""
        self.parts: list[bytes] = []
        """The events that were sent."""

    @property
    def _encoder(self) -> Encoder:
        return Verbatim() if self.call is None else self.call.encoder

    async def again(self, answer: bytes, *, stream: bool) -> None:
        """Send an answer that was sent before."""
        if not stream:
            await self.whole(answer)
            return
        await self.end(answer)

    async def whole(self, body: bytes) -> None:
        """Send a whole body."""
        self._started = True
        await send_whole(self._send, 200, body, self.headers)

    async def part(self, data: bytes) -> None:
        """Send some events."""
        self.parts.append(data)
        self._sent_at = self._loop.time()
        await self._send_part(data)

    def kept_alive(self, seconds: float) -> KeptAlive | contextlib.nullcontext[None]:
        """Return a block in which a stream of events that has been silent for so long gets a comment."""
        if seconds <= 0 or not self._encoder.content_type.startswith("text/event-stream"):
            return contextlib.nullcontext()
        self._sent_at = self._loop.time()
        return KeptAlive(self, seconds)

    @property
    def silent_seconds(self) -> float:
        """Time since events or a comment were sent."""
        return self._loop.time() - self._sent_at

    async def comment(self) -> None:
        """Send a comment, which keeps a silent connection open."""
        self._sent_at = self._loop.time()
        await self._send_part(KEEP_ALIVE)

    async def _send_part(self, data: bytes, *, is_last: bool = False) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._encoder.content_type.encode()), (b"cache-control", b"no-cache")]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def end(self, data: bytes) -> None:
        """Send the last events of a stream."""
        self.parts.append(data)
        await self._send_part(data, is_last=True)

    async def fail(self, error: TurnwiseError, services: Services) -> None:
        """Report an error: as the status, or as the last event of a stream that has started."""
        status, body, headers = problems.answer(error)
        services.metrics.refused.labels(problems.lookup(error)[2]).inc()
        if not self._started:
            await send_whole(self._send, status, self._dialect.encode_error(status, body), headers)
            return
        await self.end(self._encoder.error(body))


class KeptAlive:
    """Sends a comment whenever a stream has been silent for some time.

    One timer runs for the whole stream. It is not a closure that names itself: such a cycle would keep the events of
    every stream in memory until the next garbage collection.
    """

    __slots__ = ("_loop", "_reply", "_seconds", "_sending", "_timer")

    def __init__(self, reply: ReplySender, seconds: float) -> None:
        self._reply = reply
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._check)

    def _check(self) -> None:
        """Send a comment if it is time for one, and the last one has been sent."""
        silent = self._reply.silent_seconds
        if silent >= self._seconds and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(self._reply.comment())
            silent = 0.0
        self._timer = self._loop.call_later(max(self._seconds - silent, MIN_CHECK_SECONDS), self._check)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
