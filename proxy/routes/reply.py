"""Send one reply of the data plane: whole, streamed, or as an error in the dialect's own shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy import problems
from proxy.asgi import Send, send_whole
from proxy.dialects.base import Dialect, Encoder
from proxy.dialects.sse import Verbatim
from turnwise.errors import TurnwiseError

if TYPE_CHECKING:
    from proxy.services import Services


class Reply:
    """One reply: it knows whether its head has been sent, and so how an error can still be reported."""

    def __init__(self, send: Send, dialect: Dialect) -> None:
        self._send = send
        self._dialect = dialect
        self._started = False
        self.encoder: Encoder = Verbatim()
        """Writes the error event at the end of a failed stream."""
        self.headers: dict[str, str] = {}
        """Extra headers of a successful reply."""
        self.parts: list[bytes] = []
        """The events that were sent."""

    async def again(self, answer: bytes, *, stream: bool) -> None:
        """Send an answer that was sent before."""
        if not stream:
            await self.whole(answer)
            return
        await self.part(answer)
        await self.end()

    async def whole(self, body: bytes) -> None:
        """Send a whole body."""
        self._started = True
        await send_whole(self._send, 200, body, self.headers)

    async def part(self, data: bytes) -> None:
        """Send some events."""
        if not self._started:
            self._started = True
            headers = [(b"content-type", self.encoder.content_type.encode()), (b"cache-control", b"no-cache")]
            headers += [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.parts.append(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """End a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: TurnwiseError, services: Services) -> None:
        """Report an error: as the status, or as the last event of a stream that has started."""
        status, body, headers = problems.answer(error)
        services.metrics.refused.labels(problems.lookup(error)[2]).inc()
        if not self._started:
            await send_whole(self._send, status, self._dialect.encode_error(status, body), headers)
            return
        await self.part(self.encoder.error(body))
        await self.end()
