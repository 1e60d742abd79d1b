"""Histories of the last calls, by session: the next call of a session digests only the messages that are new to it.

A history is used again if the call begins with the same messages, which are compared as JSON text: comparing the text
of a message takes a tenth of the time of digesting it. Long requests have their own memory, in `known_requests`.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

from proxy.continuation.digests import History
from proxy.settings import ProxySettings
from turnwise.types import SessionKey

SHARE = 8
"""The histories get one part in so many of `request_cache_bytes`."""
HISTORY_BYTES = 6_000
"""Memory of a history without messages, roughly: most of it is for its three running hashes."""
MESSAGE_BYTES = 200
"""Memory of the digests after one message, roughly."""


class _Recent(NamedTuple):
    """The messages of a session's last call."""

    text: bytes
    """Their JSON array, without the bracket that closes it."""
    history: History
    num_bytes: int
    """Memory, roughly."""


class RecentHistories:
    """The histories of the sessions that were used last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_session: collections.OrderedDict[SessionKey, _Recent] = collections.OrderedDict()

    def find(self, session: SessionKey, messages_json: bytes) -> History | None:
        """Return the history of the session's last call if the messages begin with those of that call."""
        recent = self._by_session.get(session)
        if recent is None:
            return None
        end = len(recent.text)
        is_same = messages_json.startswith(recent.text) and messages_json[end : end + 1] in (b",", b"]")
        return recent.history if is_same else None

    def keep(self, session: SessionKey, messages_json: bytes, history: History) -> None:
        """Replace the session's history; drop the least recently used ones if all take too much memory."""
        replaced = self._by_session.pop(session, None)
        if replaced is not None:
            self._num_bytes -= replaced.num_bytes
        text = messages_json[:-1]
        num_bytes = HISTORY_BYTES + len(text) + len(history.full) * MESSAGE_BYTES
        if num_bytes > self._max_bytes:
            return
        self._by_session[session] = _Recent(text, history, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._by_session.popitem(last=False)[1].num_bytes


def recent_bytes(settings: ProxySettings) -> int:
    """Return the memory for these histories."""
    return settings.request_cache_bytes // SHARE


def long_request_bytes(settings: ProxySettings) -> int:
    """Return the rest of `request_cache_bytes`, which is for the known long requests."""
    return settings.request_cache_bytes - recent_bytes(settings)
