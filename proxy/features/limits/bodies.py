"""How much of request bodies may be in memory: what counts is what has arrived.

The bytes of a body count for its key, its tenant and the proxy until the call has its place under the other limits, so
calls that wait for a place do not fill the memory. A part that does not fit is read later. Room is kept for the oldest
body to become whole, so bodies that wait for each other always end. The sizes are multiples of the longest body. Short
bodies are not counted: the connection has received them by then.
"""

from __future__ import annotations

import asyncio

from proxy.http.asgi import BodyMemory
from turnwise.errors import TooLarge

KEY_BODIES, TENANT_BODIES, ALL_BODIES = 2, 4, 8
"""Bodies of the longest kind that one key with its session keys, one tenant, and all together may have in memory."""


class _Share:
    """The bytes of bodies that one key, one tenant or the whole proxy has in memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0
        self.arriving: dict[ArrivingBody, None] = {}
        """Bodies that are not whole, the oldest first."""
        self.num_bodies = 0


class ArrivingBody(BodyMemory):
    """The memory of one body."""

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


class Bodies:
    """The bodies of one process."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.freed = asyncio.Event()
        """Set when a body became whole or left, and replaced by another one."""
        self._shares: dict[tuple[str, ...], _Share] = {}

    def open(self, tenant: str, key_id: str, headers: dict[bytes, bytes]) -> ArrivingBody:
        """Return the memory of a body that is about to be read.

        Raises:
            TooLarge: its declared length is larger than the longest body.
        """
        num_bytes = int(headers.get(b"content-length", b"0"))  # the server's parser has checked it
        if num_bytes > self.longest:
            raise TooLarge(f"the request body has {num_bytes} bytes; the limit is {self.longest}, send less")
        names = ((), ALL_BODIES), ((tenant,), TENANT_BODIES), ((tenant, key_id), KEY_BODIES)
        shares = [self._shares.setdefault(name, _Share(number * self.longest)) for name, number in names]
        body = ArrivingBody(self, shares)
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
