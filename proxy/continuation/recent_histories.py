"""Histories of the last calls, by session: the next call of a session digests only the messages that are new to it.

A history is used again if the call begins with the same messages, which are compared as JSON text: comparing the text
of a message takes a tenth of the time of digesting it. Long requests have their own memory, in `known_requests`.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import orjson

from proxy.continuation.digests import History
from turnwise.types import Json, SessionKey

MAX_BYTES = 16 * 2**20
"""Memory of all histories."""
MESSAGE_BYTES = 200
"""Memory of the digests after one message, roughly."""


class _Recent(NamedTuple):
    """The messages of a session's last call."""

    num_messages: int
    text: bytes
    """The messages as JSON."""
    history: History

    @property
    def num_bytes(self) -> int:
        """Memory, roughly."""
        return len(self.text) + self.num_messages * MESSAGE_BYTES


class RecentHistories:
    """The histories of the sessions that were used last."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_session: collections.OrderedDict[SessionKey, _Recent] = collections.OrderedDict()

    def find(self, session: SessionKey, messages: list[Json]) -> History | None:
        """Return the history of the session's last call if the messages begin with those of that call."""
        recent = self._by_session.get(session)
        if recent is None or recent.num_messages > len(messages):
            return None
        is_same = orjson.dumps(messages[: recent.num_messages]) == recent.text
        return recent.history if is_same else None

    def keep(self, session: SessionKey, messages: list[Json], history: History) -> None:
        """Replace the session's history; drop the least recently used ones if all take too much memory."""
        replaced = self._by_session.pop(session, None)
        if replaced is not None:
            self._num_bytes -= replaced.num_bytes
        recent = self._by_session[session] = _Recent(len(messages), orjson.dumps(messages), history)
        self._num_bytes += recent.num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._by_session.popitem(last=False)[1].num_bytes
