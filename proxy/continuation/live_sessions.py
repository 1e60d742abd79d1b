"""The sessions in memory, up to a number of sessions and of bytes; the rest is read back from the store."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from proxy.continuation.forest import KnownTurn
from proxy.continuation.live import LiveSession
from proxy.continuation.token_cache import TokenCache
from turnwise.types import SessionKey


class LiveSessions:
    """Keeps the sessions that were used last."""

    def __init__(self, max_sessions: int, max_bytes: int, token_cache: TokenCache) -> None:
        self.num_bytes = 0
        """Memory of all sessions, roughly, without their tokens."""
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._token_cache = token_cache
        self._live: collections.OrderedDict[SessionKey, LiveSession] = collections.OrderedDict()

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._live)

    def find(self, key: SessionKey) -> LiveSession | None:
        """Return a session, which counts as its use; None if it is not in memory."""
        live = self._live.get(key)
        if live is not None:
            self._live.move_to_end(key)
        return live

    def put(self, live: LiveSession) -> None:
        """Add a session; drop others above the limits."""
        self.drop(live.key)
        self._live[live.key] = live
        self.num_bytes += live.num_bytes
        self._evict()

    def add_turns(self, live: LiveSession, turns: Iterable[KnownTurn]) -> None:
        """Add turns to a session, which may have been dropped meanwhile; drop others above the limits."""
        before = live.num_bytes
        for turn in turns:
            live.forest.add(turn)
            self.keep_tokens(live, turn)
        if self._holds(live):
            self.num_bytes += live.num_bytes - before
            self._evict()

    def keep_tokens(self, live: LiveSession, turn: KnownTurn) -> None:
        """Count the tokens of a turn, which may drop those of the sessions that were used least recently."""
        if self._holds(live):
            self._token_cache.add(live, turn)

    def _holds(self, live: LiveSession) -> bool:
        return self._live.get(live.key) is live

    def drop(self, key: SessionKey) -> None:
        """Remove a session."""
        live = self._live.pop(key, None)
        if live is not None:
            self.num_bytes -= live.num_bytes
            self._token_cache.drop(live)

    def clear(self) -> None:
        """Remove all sessions."""
        for key in list(self._live):
            self.drop(key)

    def _evict(self) -> None:
        """Drop the least recently used sessions; a single session above the limit is kept until the next."""
        while len(self._live) > 1 and (len(self._live) > self._max_sessions or self.num_bytes > self._max_bytes):
            self.drop(next(iter(self._live)))
