"""The answer of a server to one request, as its bytes arrive, and how it can fail."""

from __future__ import annotations

import asyncio
import math
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

    def leave(self) -> None:
        """Keep the connection for the next request, or close it if the answer is not complete."""


class Answer:
    """The server's answer to one request: its head, and its body as it arrives.

    Leaving the `with` block before the body is complete closes the connection, so that the server stops its work.
    """

    __slots__ = ("_error", "_loop", "_source", "body", "content_type", "head", "is_complete", "status", "waiting_since")

    def __init__(self, source: Source, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
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
        self._source = source
        self._error: Disconnected | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._source.leave()

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
