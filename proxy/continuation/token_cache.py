"""The token ids of live sessions, in memory up to a number of bytes."""

from __future__ import annotations

import collections

from proxy.continuation.forest import KnownTurn
from proxy.continuation.live import LiveSession


class TokenCache:
    """Keeps the ids of whole sessions, because the turns of a session share them; evicts the least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._cached: collections.OrderedDict[int, tuple[LiveSession, int]] = collections.OrderedDict()
        """The sessions and the bytes of their ids, by the session's identity."""

    def add(self, live: LiveSession, turn: KnownTurn) -> None:
        """Count a new turn's ids, without those that it shares with its parent; evict sessions above the limit."""
        own = _own_bytes(live, turn)
        _, size = self._cached.pop(id(live), (live, 0))
        self._cached[id(live)] = (live, size + own)
        self._num_bytes += own
        while self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._cached.values()))[0])

    def drop(self, live: LiveSession) -> None:
        """Forget the ids of a session."""
        entry = self._cached.pop(id(live), None)
        if entry is not None:
            self._num_bytes -= entry[1]
            for turn in live.forest.by_id.values():
                turn.tokens = None


def _own_bytes(live: LiveSession, turn: KnownTurn) -> int:
    """Return the bytes of a turn's ids without those of its parent that are in memory."""
    if turn.tokens is None:
        return 0
    parent = live.forest.by_id.get(turn.parent_turn_id or "")
    shared = 0 if parent is None or parent.tokens is None else parent.tokens.num_bytes
    return turn.tokens.num_bytes - shared
