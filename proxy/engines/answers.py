"""The answer of a server to one request, as its bytes arrive, and how it can fail."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Protocol, Self

from proxy.http.asgi import joined

BUFFERED_BYTES = 1 << 20
"""Bytes of an answer that are buffered for a slow reader before reading from the engine pauses."""
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

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        """Whether the host answered that nothing listens on the port."""


class Source(Protocol):
    """The connection that an answer arrives on."""

    def abort(self) -> None:
        """Close at once."""

    def resume(self) -> None:
        """Resume reading."""


class Answer:
    """The server's answer to one request: its head, and its body as it arrives.

    Leaving the `with` block before the body is complete closes the connection, so that the server stops its work.
    """

    __slots__ = ("_connection", "_error", "_is_complete", "_num_bytes", "_parts", "_waiter", "content_type", "status")

    def __init__(self, connection: Source) -> None:
        self.status = 0
        self.content_type = ""
        self._connection = connection
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._is_complete = False
        self._error: Disconnected | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_complete:
            self._connection.abort()

    async def read(self, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
        """Return the whole body.

        Raises:
            Disconnected: the connection broke before its end.
            AnswerTooLong: it has more than `max_bytes`; the rest is not read.
        """
        parts: list[bytes] = []
        num_bytes = 0
        while self._parts or not self._is_complete:
            if not self._parts:
                await self.wait()
                continue
            num_bytes += self._num_bytes
            if num_bytes > max_bytes:
                raise AnswerTooLong(max_bytes)
            parts += self._take()
        return parts[0] if len(parts) == 1 else await joined(parts, num_bytes)

    async def next_part(self) -> bytes:
        """Return the data that has arrived since the last part, at least one byte; nothing once the body is complete.

        Raises:
            Disconnected: the connection broke; all data before that has been returned.
        """
        while not self._parts and not self._is_complete:
            await self.wait()
        return b"".join(self._take())

    async def wait(self) -> None:
        """Wait for the head, for data, or for the end of the body.

        Raises:
            Disconnected: the connection broke.
        """
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def feed(self, part: bytes) -> bool:
        """Buffer a part of the body; return whether the buffer is full."""
        self._parts.append(part)
        self._num_bytes += len(part)
        self.wake()
        return self._num_bytes > BUFFERED_BYTES

    def end(self, error: Disconnected | None = None) -> None:
        """End the body, or fail it with an error."""
        self._is_complete, self._error = error is None, error
        if error is None or self._waiter is None:
            self.wake()
        elif not self._waiter.done():
            self._waiter.set_exception(error)

    def wake(self) -> None:
        """Wake the reader."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        self._num_bytes = 0
        if not self._is_complete:
            self._connection.resume()
        return parts
