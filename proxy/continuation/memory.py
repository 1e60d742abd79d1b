"""The sessions in memory: their turns up to a number of bytes, and the token ids of these turns up to another.

The store has everything, so what is dropped is read back. The ids of a whole session are kept or dropped together,
because its turns share them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import orjson

from proxy.continuation.conversation import Conversation
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
    token_bytes: int = 0
    """Memory of the token ids of its turns."""

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
    conversation: Conversation
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""
    parent: KnownTurn | None = None
    """The turn that the call extends, while it is reserved for the call."""


class _Recent:
    """Sessions with their counted memory; above the limits those that were used least recently are dropped.

    A single session above the limit is kept until the next.
    """

    def __init__(self, max_bytes: int, max_sessions: int) -> None:
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self.num_bytes = 0
        self.sessions: collections.OrderedDict[SessionKey, tuple[LiveSession, int]] = collections.OrderedDict()

    def count(self, live: LiveSession, num_bytes: int) -> list[LiveSession]:
        """Add a session, or count its memory again; return the sessions that are dropped for it."""
        self.drop(live.key)
        self.sessions[live.key] = live, num_bytes
        self.num_bytes += num_bytes
        dropped = []
        while len(self.sessions) > 1 and (len(self.sessions) > self._max_sessions or self.num_bytes > self._max_bytes):
            oldest = next(iter(self.sessions.values()))[0]
            self.drop(oldest.key)
            dropped.append(oldest)
        return dropped

    def drop(self, key: SessionKey) -> None:
        """Remove a session."""
        self.num_bytes -= self.sessions.pop(key, (None, 0))[1]


class LiveSessions:
    """Keeps the sessions that were used last, and the token ids of those whose ids were used last."""

    def __init__(self, max_sessions: int, max_bytes: int, max_token_bytes: int) -> None:
        self._live = _Recent(max_bytes, max_sessions)
        self._with_tokens = _Recent(max_token_bytes, max_sessions)

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._live.sessions)

    @property
    def num_bytes(self) -> int:
        """Memory of all sessions, roughly, without their tokens."""
        return self._live.num_bytes

    def find(self, key: SessionKey) -> LiveSession | None:
        """Return a session, which counts as its use; None if it is not in memory."""
        live, _ = self._live.sessions.get(key, (None, 0))
        if live is not None:
            self._live.sessions.move_to_end(key)
        return live

    def put(self, live: LiveSession) -> None:
        """Add a session, or count its memory again; drop others above the limits."""
        for dropped in self._live.count(live, live.num_bytes):
            self._drop_tokens(dropped)

    def add_turns(self, live: LiveSession, turns: Iterable[KnownTurn]) -> None:
        """Add turns to a session, which may have been dropped meanwhile; drop others above the limits."""
        for turn in turns:
            self.keep_tokens(live, live.forest.add(turn))
        if self.find(live.key) is live:
            self.put(live)

    def keep_tokens(self, live: LiveSession, turn: KnownTurn) -> None:
        """Count the tokens of a turn, without those that it shares with its parent; drop those of other sessions."""
        if turn.tokens is None or self.find(live.key) is not live:
            return
        parent = live.forest.by_id.get(turn.parent_turn_id or "")
        shared = 0 if parent is None or parent.tokens is None else parent.tokens.num_bytes
        live.token_bytes += turn.tokens.num_bytes - shared
        for dropped in self._with_tokens.count(live, live.token_bytes):
            self._drop_tokens(dropped)

    def drop(self, key: SessionKey) -> None:
        """Remove a session."""
        live = self.find(key)
        if live is not None:
            self._live.drop(key)
            self._drop_tokens(live)

    def clear(self) -> None:
        """Remove all sessions."""
        for key in list(self._live.sessions):
            self.drop(key)

    def _drop_tokens(self, live: LiveSession) -> None:
        self._with_tokens.drop(live.key)
        live.token_bytes = 0
        for turn in live.forest.by_id.values():
            turn.tokens = None


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
