"""Token ids of the turns that calls are likely to extend, in memory up to a number of bytes."""

from __future__ import annotations

import collections

from proxy.continuation.plan import KnownTurn


class TokenCache:
    """Keeps the tokens of the last turn of each chain; evicts the turns that were added first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._cached: collections.OrderedDict[str, tuple[KnownTurn, int]] = collections.OrderedDict()

    def add(self, turn: KnownTurn) -> None:
        """Keep a new turn's tokens and drop those of its parent; evict the oldest entries above the limit."""
        self._drop(turn.parent_turn_id or "")
        self._drop(turn.turn_id)
        size = len(turn.tokens or b"")
        self._cached[turn.turn_id] = (turn, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._cached)))

    def _drop(self, turn_id: str) -> None:
        entry = self._cached.pop(turn_id, None)
        if entry is not None:
            entry[0].tokens = None
            self._num_bytes -= entry[1]
