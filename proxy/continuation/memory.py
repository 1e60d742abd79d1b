"""The sessions in memory: their turns up to a number of bytes, and the token ids of these turns up to another.

The store has everything, so what is dropped is read back. The ids of a whole session are kept or dropped together,
because its turns share them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import orjson

from proxy.continuation.digests import chained, message_digest
from proxy.continuation.forest import NO_ROOT, Forest, KnownTurn
from proxy.continuation.roles import read_root
from turnwise.types import Session, SessionKey, Turn

SESSION_BYTES = 1_000
"""Memory of a session without turns and documents."""
DECODED = 10
"""Memory of a decoded document, in bytes for each byte of its JSON."""


@dataclasses.dataclass(slots=True)
class LiveSession:
    """A session in memory."""

    session: Session
    forest: Forest = dataclasses.field(default_factory=Forest)
    key: SessionKey = dataclasses.field(init=False)
    """Tenant and id."""
    _document_bytes: int = dataclasses.field(init=False)
    num_read: int = 0
    """The `seq` up to which stored turns have been read, or were found to be known."""

    @property
    def num_bytes(self) -> int:
        """Memory, roughly, without the tokens of its turns."""
        return SESSION_BYTES + self._document_bytes + self.forest.num_bytes

    def __post_init__(self) -> None:
        """Count the session's documents, which do not change while it is in memory."""
        self.key = self.session.tenant, self.session.session_id
        self._document_bytes = DECODED * len(orjson.dumps([self.session.metadata, self.session.sampling]))


@dataclasses.dataclass(slots=True)
class Placement:
    """The session that a call belongs to, and how it was found."""

    live: LiveSession
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""
    parent: KnownTurn | None = None
    """The turn that the call extends, while it is reserved for the call."""


class TokenCache:
    """Keeps the ids of whole sessions, because the turns of a session share them; evicts the least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._cached: collections.OrderedDict[int, tuple[LiveSession, int]] = collections.OrderedDict()
        """The sessions and the bytes of their ids, by the session's identity."""

    def add(self, live: LiveSession, turn: KnownTurn) -> None:
        """Count a new turn's ids, without those that it shares with its parent; evict sessions above the limit."""
        parent = live.forest.by_id.get(turn.parent_turn_id or "")
        shared = 0 if parent is None or parent.tokens is None else parent.tokens.num_bytes
        own = 0 if turn.tokens is None else turn.tokens.num_bytes - shared
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

    def add_turns(self, live: LiveSession, turns: Sequence[KnownTurn]) -> None:
        """Add turns to a session, which may have been dropped meanwhile; drop others above the limits."""
        before = live.num_bytes
        for turn in turns:
            live.forest.add(turn)
        if self._live.get(live.key) is live:
            for turn in turns:
                self._token_cache.add(live, turn)
            self.num_bytes += live.num_bytes - before
            self._evict()

    def keep_tokens(self, live: LiveSession, turn: KnownTurn) -> None:
        """Count the tokens of a turn, which may drop those of the sessions that were used least recently."""
        if self._live.get(live.key) is live:
            self._token_cache.add(live, turn)

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


def known_turns(turns: Sequence[Turn], by_id: Mapping[str, KnownTurn], fields: frozenset[str]) -> list[KnownTurn]:
    """Return the turns with sampled tokens, in the order of their commits, as they are kept in memory.

    Args:
        turns: stored turns that are not in memory, each with the messages that it adds to its parent's.
        by_id: the session's turns in memory.
        fields: what the template prints of `NAME` and `CALL_IDS`.
    """
    found: dict[str, KnownTurn] = {}
    for turn in turns:
        if not len(turn.token_ids):
            continue
        parent = found.get(turn.parent_turn_id or "") or by_id.get(turn.parent_turn_id or "")
        digests = (message_digest(message, fields) for message in turn.messages)
        found[turn.turn_id] = KnownTurn.of(
            turn,
            read_root(turn.messages, turn.tools, turn.sampling) if turn.parent_turn_id is None else NO_ROOT,
            num_messages=(0 if parent is None else parent.num_messages) + len(turn.messages) + 1,
            prompt_digest=functools.reduce(chained, digests, b"" if parent is None else parent.messages_digest),
        )
    return list(found.values())
