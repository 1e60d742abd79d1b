"""Bytes of request bodies in memory, reserved before a body is read: of one key, and in all.

A call keeps its bytes until it has its place under the other limits, so calls that wait for a place do not fill the
memory. A request that does not fit waits, and the connection's time limit ends it. The sizes are multiples of the
longest body, so that one always fits. Short bodies are not counted: the connection has received them by then.
"""

from __future__ import annotations

import asyncio
import collections
from typing import NamedTuple, Self

from proxy.auth import Principal
from turnwise.errors import InvalidRequest, TooLarge

KEY_BODIES = 2
"""Bodies of the longest kind that one key, with its session keys, may have in memory."""
ALL_BODIES = 8
"""Bodies of the longest kind that all keys together may have in memory."""


SHORT_DIGITS = 5
"""A call's body is short if its declared length has no more digits."""


class _Waiter(NamedTuple):
    """A request whose body does not fit yet."""

    key_id: str
    num_bytes: int
    granted: asyncio.Future[None]


class Reserved:
    """The bytes of one body."""

    __slots__ = ("_bodies", "_key_id", "_num_bytes")

    def __init__(self, bodies: Bodies, key_id: str, num_bytes: int) -> None:
        self._bodies = bodies
        self._key_id = key_id
        self._num_bytes = num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Return the bytes; again has no effect."""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._bodies.give_back(self._key_id, num_bytes)


class Bodies:
    """Admits bodies, the first that fits first."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._num_bytes = 0
        self._of_key: collections.Counter[str] = collections.Counter()
        self._waiting: list[_Waiter] = []

    async def reserve(self, principal: Principal, headers: dict[bytes, bytes]) -> Reserved:
        """Wait until the body of a request fits into memory; it counts with its declared length or the longest one.

        Raises:
            TooLarge: the declared length is larger than the longest body.
            InvalidRequest: the declared length is no number.
        """
        key_id, num_bytes = principal.root_key_id, self._max_body_bytes
        if declared := headers.get(b"content-length"):
            if not declared.isdigit():
                raise InvalidRequest(f"content-length {declared!r} is not a number")
            num_bytes = int(declared[:20])
            if num_bytes > self._max_body_bytes:
                raise TooLarge(
                    f"the request body has {num_bytes} bytes; the limit is {self._max_body_bytes}, send less"
                )
        if self._waiting or not self._fits(key_id, num_bytes):
            await self._wait(_Waiter(key_id, num_bytes, asyncio.get_running_loop().create_future()))
        else:
            self._take(key_id, num_bytes)
        return Reserved(self, key_id, num_bytes)

    def give_back(self, key_id: str, num_bytes: int) -> None:
        """Return the bytes of a body."""
        self._num_bytes -= num_bytes
        self._of_key[key_id] -= num_bytes
        if not self._of_key[key_id]:
            del self._of_key[key_id]
        if self._waiting:
            self._grant()

    def _fits(self, key_id: str, num_bytes: int) -> bool:
        of_key = self._of_key.get(key_id, 0)
        is_in_key = of_key + num_bytes <= KEY_BODIES * self._max_body_bytes
        return is_in_key and self._num_bytes + num_bytes <= ALL_BODIES * self._max_body_bytes

    def _take(self, key_id: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._of_key[key_id] += num_bytes

    async def _wait(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self._grant()  # those before it may wait for bytes of their own key
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.give_back(waiter.key_id, waiter.num_bytes)
            raise

    def _grant(self) -> None:
        """Let the first bodies in that fit; one that does not fit into its key's share delays no other key."""
        for waiter in self._waiting[:]:
            if not waiter.granted.cancelled() and self._fits(waiter.key_id, waiter.num_bytes):
                self._waiting.remove(waiter)
                self._take(waiter.key_id, waiter.num_bytes)
                waiter.granted.set_result(None)
