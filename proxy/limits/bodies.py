"""Bytes of request bodies in memory, reserved before a body is read: of one key, and in all.

A call keeps its bytes until it has its place under the other limits, so calls that wait for a place do not fill the
memory. A request that does not fit waits, and the connection's time limit ends it. The sizes are multiples of the
longest body, so that one always fits. Short bodies are not counted: the connection has received them by then.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib

from proxy.auth import Principal
from turnwise.errors import TooLarge

KEY_BODIES = 2
"""Bodies of the longest kind that one key, with its session keys, may have in memory."""
ALL_BODIES = 8
"""Bodies of the longest kind that all keys together may have in memory."""
SHORT_DIGITS = 5
"""A call's body is short if its declared length has no more digits."""


class Bodies:
    """Admits bodies, the first that fits first."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._of_key: collections.Counter[str] = collections.Counter()
        self._freed = asyncio.Event()
        """Set when bytes are given back, and replaced by another one."""

    async def reserve(self, principal: Principal, headers: dict[bytes, bytes]) -> contextlib.ExitStack:
        """Wait until the body of a request fits into memory; it counts with its declared length or the longest one.

        The end of the block of what is returned, or its `close`, gives the bytes back.

        Raises:
            TooLarge: the declared length is larger than the longest body.
        """
        key_id, declared = principal.root_key_id, headers.get(b"content-length")
        num_bytes = self._max_body_bytes if declared is None else int(declared)  # the server's parser has checked it
        if num_bytes > self._max_body_bytes:
            raise TooLarge(f"the request body has {num_bytes} bytes; the limit is {self._max_body_bytes}, send less")
        while not self._fits(key_id, num_bytes):
            await self._freed.wait()
        self._of_key[key_id] += num_bytes
        reserved = contextlib.ExitStack()
        reserved.callback(self._give_back, key_id, num_bytes)
        return reserved

    def _give_back(self, key_id: str, num_bytes: int) -> None:
        self._of_key[key_id] -= num_bytes
        if not self._of_key[key_id]:
            del self._of_key[key_id]
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def _fits(self, key_id: str, num_bytes: int) -> bool:
        is_in_key = self._of_key[key_id] + num_bytes <= KEY_BODIES * self._max_body_bytes
        return is_in_key and self._of_key.total() + num_bytes <= ALL_BODIES * self._max_body_bytes
