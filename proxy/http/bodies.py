"""How much of request bodies may be in memory, and how slowly they may arrive: what counts is what has arrived.

The bytes of a body count for its key, its tenant and the proxy until the call has its place under the other limits, so
calls that wait for a place do not fill the memory. A part that does not fit is read later. Room is kept for the oldest
body to become whole, so bodies that wait for each other always end. The sizes are multiples of the longest body. Short
bodies are not counted: the connection has received them by then.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive

from proxy.http.asgi import joined
from turnwise.errors import InvalidRequest, TooLarge, TooSlow

KEY_BODIES, TENANT_BODIES, ALL_BODIES = 2, 4, 8
"""Bodies of the longest kind that one key with its session keys, one tenant, and all together may have in memory."""
SHORT_DIGITS = 5
"""A call's body is short if its declared length has no more digits."""
LEAST_BYTES_PER_SECOND = 1024
PATIENCE_SECONDS = 10.0
"""How long a begun body may bring nothing; what it brings restores the time at the least rate."""


class _Share:
    """The bytes of bodies that one key, one tenant or the whole proxy has in memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0
        self.arriving: dict[Body, None] = {}
        """Bodies that are not whole, the oldest first."""
        self.num_bodies = 0


class Body:
    """The memory of one body; `close`, or the end of its block, gives it back."""

    def __init__(self, bodies: Bodies, shares: list[_Share]) -> None:
        self._bodies = bodies
        self._shares = shares
        self.num_bytes = 0

    async def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, as soon as they fit."""
        while not self._fits(num_bytes):
            await self._bodies.freed.wait()
        self.num_bytes += num_bytes
        for share in self._shares:
            share.num_bytes += num_bytes

    def _fits(self, num_bytes: int) -> bool:
        for share in self._shares:
            oldest = next(iter(share.arriving))
            kept = 0 if oldest is self else max(0, self._bodies.longest - oldest.num_bytes)
            if share.num_bytes + num_bytes + kept > share.most:
                return False
        return True

    def end(self) -> None:
        """Note that the body is whole."""
        for share in self._shares:
            share.arriving.pop(self, None)
        self._bodies.wake()

    def close(self) -> None:
        self.end()
        for share in self._shares:
            share.num_bytes -= self.num_bytes
            share.num_bodies -= 1
        self._bodies.forget(self._shares)
        self._shares, self.num_bytes = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Bodies:
    """The bodies of one process."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.freed = asyncio.Event()
        """Set when a body became whole or left, and replaced by another one."""
        self._shares: dict[tuple[str, ...], _Share] = {}

    def open(self, tenant: str, key_id: str, headers: dict[bytes, bytes]) -> Body:
        """Return the memory of a body that is about to be read.

        Raises:
            TooLarge: its declared length is larger than the longest body.
        """
        num_bytes = int(headers.get(b"content-length", b"0"))  # the server's parser has checked it
        if num_bytes > self.longest:
            raise TooLarge(f"the request body has {num_bytes} bytes; the limit is {self.longest}, send less")
        names = ((), ALL_BODIES), ((tenant,), TENANT_BODIES), ((tenant, key_id), KEY_BODIES)
        shares = [self._shares.setdefault(name, _Share(number * self.longest)) for name, number in names]
        body = Body(self, shares)
        for share in shares:
            share.num_bodies += 1
            share.arriving[body] = None
        return body

    def wake(self) -> None:
        freed, self.freed = self.freed, asyncio.Event()
        freed.set()

    def forget(self, shares: list[_Share]) -> None:
        """Forget the shares of tenants and keys without bodies."""
        if not all(share.num_bodies for share in shares):
            self._shares = {name: share for name, share in self._shares.items() if share.num_bodies}


async def read_body(receive: Receive, *, max_bytes: int, memory: Body | None = None) -> bytes:
    """Return the whole request body. The connection limits the time that it may take (see `proxy.http.connections`).

    Args:
        receive: gives its parts.
        max_bytes: the most that it may have.
        memory: what its bytes are counted in; None for a short body.

    Raises:
        TooLarge: it is longer than `max_bytes`.
        TooSlow: it has begun, and arrives too slowly.
        InvalidRequest: the client disconnected before it was complete.
    """
    parts: list[bytes] = []
    num_bytes, has_more, patience = 0, True, PATIENCE_SECONDS
    while has_more:
        if not parts:
            message = await receive()
        else:
            message, patience = await _receive_in_time(receive, patience, len(parts[-1]))
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client disconnected before its request was complete")
        part: bytes = message.get("body", b"")
        has_more = bool(message.get("more_body"))
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"the request body is larger than {max_bytes} bytes, which is the limit; send less")
        if memory is not None:
            await memory.add(len(part))
        parts.append(part)
    if memory is not None:
        memory.end()
    return parts[0] if len(parts) == 1 else await joined(parts, num_bytes)


async def _receive_in_time(receive: Receive, patience: float, num_new_bytes: int) -> tuple[Message, float]:
    """Return the next part of a body and the time that it may still bring nothing.

    The time in which the proxy does not read is not the client's.
    """
    patience = min(PATIENCE_SECONDS, patience + num_new_bytes / LEAST_BYTES_PER_SECOND)
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience):
            message = await receive()
    except TimeoutError as error:
        raise TooSlow(
            f"the request body arrives more slowly than {LEAST_BYTES_PER_SECOND} bytes a second; send it again",
            code="request_timeout",
        ) from error
    return message, patience - (time.monotonic() - began)
