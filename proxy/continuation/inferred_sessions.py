"""Which sessions contain a conversation, by API key: for calls that name no session."""

from __future__ import annotations

import collections
from typing import NamedTuple

MAX_COMPARED = 1_000
"""Sessions with the same conversation that one call is compared with, the newest ones."""


class Caller(NamedTuple):
    """Whose conversations a call may continue. Key ids are unique only within a tenant."""

    tenant: str
    key_id: str


class InferredSessions:
    """Keeps ids of sessions by their conversations, up to a number in all; the oldest are dropped."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._found: collections.OrderedDict[tuple[Caller, bytes], dict[str, None]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._num_ids

    def find(self, caller: Caller, digest: bytes) -> list[str]:
        """Return the sessions of this caller that contain the conversation with this digest, the oldest first."""
        return list(self._found.get((caller, digest), ()))[-MAX_COMPARED:]

    def add(self, caller: Caller, digest: bytes, session_id: str) -> None:
        """Add a session as the newest of its conversation."""
        session_ids = self._found.setdefault((caller, digest), {})
        self._found.move_to_end((caller, digest))
        self._num_ids += session_id not in session_ids
        session_ids[session_id] = None
        while self._num_ids > self._max_ids:
            self._drop_oldest()

    def clear(self) -> None:
        """Drop all of them."""
        self._found.clear()
        self._num_ids = 0

    def _drop_oldest(self) -> None:
        """Drop the oldest session of the conversation that got no session for the longest time."""
        key, session_ids = next(iter(self._found.items()))
        del session_ids[next(iter(session_ids))]
        self._num_ids -= 1
        if not session_ids:
            del self._found[key]
