"""Which sessions, turns and ids stay in memory, over the store, so that any process can continue any session.

Their turns are kept up to a number of bytes, and the token ids of these turns up to another; what is dropped is read
back. The ids of a whole session are kept or dropped together, because its turns share them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

from proxy.auth import Principal, session_deleted
from proxy.dialects.base import Call
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.sessions.conversation import (
    NO_FIELDS,
    chained,
    message_digest,
    tool_call_ids,
)
from proxy.sessions.forest import Describe, EncodedIds, KnownTurn, TurnForest, encode_ids
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import NotFound
from turnwise.json_text import dumps
from turnwise.parts import known as PARTS  # noqa: N812
from turnwise.store import conversations, sessions
from turnwise.store.database import Connection, Database
from turnwise.types import Outcome, Session, SessionKey, Turn

MAX_SESSIONS = 20_000
"""Maximum number of sessions in the memory of one process."""
SESSION_BYTES = 1_000
"""Memory of a session without turns and documents."""
DECODED = 10
"""Memory of a decoded document, in bytes for each byte of its JSON."""
TRUNCATION = "truncate_prompt_tokens"
"""Request field, stored with a turn's sampling, that lets the engine leave out the begin of a prompt."""


Enter: TypeAlias = Callable[[Call, Session, str], None]
"""Changes a call in its session, by the id of its key."""


@dataclasses.dataclass(slots=True)
class LiveSession:
    """A session in memory."""

    session: Session
    entered: tuple[Enter, ...] = ()
    """What features change of each of its calls, before the call's conversation is read."""
    forests: defaultdict[int, TurnForest] = dataclasses.field(default_factory=lambda: defaultdict(TurnForest))
    """The turns by policy: a chain has one policy, and so have the roles that chains have beside each other."""
    key: SessionKey = dataclasses.field(init=False)
    """Tenant and id."""
    _document_bytes: int = dataclasses.field(init=False)
    num_read: int = 0
    """The `seq` up to which stored turns have been read, or were found to be known."""
    token_bytes: int = 0
    newest_number: int | None = None
    """Number of the newest session that continues it, once it is over; None until that was read from the store."""

    @property
    def num_bytes(self) -> int:
        return SESSION_BYTES + self._document_bytes + sum([each.num_bytes for each in self.forests.values()])

    def by_id(self) -> dict[str, KnownTurn]:
        return {turn_id: turn for forest in self.forests.values() for turn_id, turn in forest.by_id.items()}

    def __post_init__(self) -> None:
        self.key = self.session.tenant, self.session.session_id
        self._document_bytes = DECODED * len(dumps([self.session.metadata, self.session.sampling]))


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
        _, counted = self.sessions.pop(live.key, (None, 0))
        self.sessions[live.key] = live, num_bytes
        self.num_bytes += num_bytes - counted
        dropped = []
        while len(self.sessions) > 1 and (len(self.sessions) > self._max_sessions or self.num_bytes > self._max_bytes):
            _, (oldest, counted) = self.sessions.popitem(last=False)
            self.num_bytes -= counted
            dropped.append(oldest)
        return dropped

    def drop(self, key: SessionKey) -> None:
        self.num_bytes -= self.sessions.pop(key, (None, 0))[1]


class LiveSessions:
    """Keeps the sessions that were used last, and the token ids of those whose ids were used last."""

    def __init__(self, max_sessions: int, max_bytes: int, max_token_bytes: int) -> None:
        self._live = _Recent(max_bytes, max_sessions)
        self._with_tokens = _Recent(max_token_bytes, max_sessions)

    def __len__(self) -> int:
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
        """Add turns to a session, which may have been dropped meanwhile, or tokens to its turns.

        Drop others above the limits. The tokens of a turn are counted without those that it shares with its parent.
        """
        num_bytes = live.token_bytes
        for turn in turns:
            forest = live.forests[turn.policy_id]
            known = forest.add(turn)
            if known.tokens is not None:
                parent = forest.by_id.get(known.parent_turn_id or "")
                shared = 0 if parent is None or parent.tokens is None else parent.tokens.num_bytes
                own = known.tokens.num_bytes
                num_bytes += own - shared if own > shared else own  # what was read whole shares nothing
        if self.find(live.key) is not live:
            return
        dropped = []
        if num_bytes > live.token_bytes:
            live.token_bytes = num_bytes
            dropped = self._with_tokens.count(live, num_bytes)
        for each in dropped + self._live.count(live, live.num_bytes):
            self._drop_tokens(each)

    def drop(self, key: SessionKey) -> None:
        """Remove a session, also because its row in the store has changed."""
        live = self.find(key)
        if live is not None:
            self._live.drop(key)
            self._drop_tokens(live)

    def clear(self) -> None:
        for key in list(self._live.sessions):
            self.drop(key)

    def _drop_tokens(self, live: LiveSession) -> None:
        self._with_tokens.drop(live.key)
        live.token_bytes = 0
        for forest in live.forests.values():
            for turn in forest.by_id.values():
                turn.tokens = None


class SessionCache(LiveSessions):
    """The sessions in memory, which reads those that it lacks from the store, and opens new ones there."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        settings: ProxySettings,
        metrics: Metrics,
        faults: FaultPoints,
        opened: Sequence[Callable[[Session], Session]] = (),
        entering: Sequence[Callable[[Session], Enter | None]] = (),
        describe: Describe | None = None,
    ) -> None:
        super().__init__(MAX_SESSIONS, settings.cache_share("turns"), settings.cache_share("tokens"))
        self.fields_read = NO_FIELDS
        """What the digests of its turns cover beside roles, text and tool calls."""
        self._opened = opened
        """What features make of a new session, before it is stored."""
        self._entering = entering
        """What features return that changes the calls of a session."""
        self.describe = describe
        self._database = database
        self._writer = writer
        self._metrics = metrics
        self._faults = faults
        self._loading: dict[SessionKey, asyncio.Task[LiveSession | None]] = {}

    def live(self, session: Session) -> LiveSession:
        """Return a session as it is in memory, without its turns."""
        return LiveSession(session, self.entered(session))

    def entered(self, session: Session) -> tuple[Enter, ...]:
        """Return what changes the calls of a session."""
        return tuple(filter(None, (each(session) for each in self._entering)))

    async def find_stored(self, tenant: str, session_id: str) -> LiveSession | None:
        """Return the session with this id from memory or from the store; None if there is none."""

        async def read() -> Session | None:
            with contextlib.suppress(NotFound):
                return await self._database.fetch(sessions.read_session, tenant, session_id)
            return None

        return await self._load((tenant, session_id), read)

    async def find_own(self, principal: Principal) -> LiveSession:
        """Return the session of a session key.

        Raises:
            Unauthorized: the session was deleted, even if there is another one of its name.
        """
        assert principal.session_id is not None
        live = await self.find_stored(principal.tenant, principal.session_id)
        if live is not None and not principal.owns(live.session):
            # Another proxy may have deleted it and created one of its name.
            self.drop(live.key)
            live = await self.find_stored(principal.tenant, principal.session_id)
        if live is None or not principal.owns(live.session):
            raise session_deleted(principal.session_id)
        return live

    async def open(self, session: Session) -> LiveSession:
        """Return the session with this id; store `session` if there is none."""

        async def read() -> Session:
            return (await self._store(session))[0]

        while True:
            live = await self._load((session.tenant, session.session_id), read)
            if live is not None:  # not the result of a search that began before
                return live

    async def create(self, session: Session) -> Session:
        """Store `session` if there is none with this id; return what is stored.

        It does not trust the memory: another proxy may have deleted the session.
        """
        stored, created = await self._store(session)
        live = self.find((session.tenant, session.session_id))
        if live is not None and live.session.created_at != stored.created_at:
            self.drop(live.key)
        if created:
            self.put(self.live(stored))
        return stored

    async def refresh(self, live: LiveSession) -> None:
        """Add the turns that other processes have committed, or this process before a restart."""
        found, live.num_read = await self._database.fetch(self._read_unknown, live)
        # Some may have been committed here meanwhile.
        known = live.by_id()
        self.add_turns(live, [turn for turn in found if turn.turn_id not in known])

    async def read_tokens(self, live: LiveSession, turn: KnownTurn) -> EncodedIds | None:
        """Read the prompt and sampled ids of a turn, which have left the memory; None if they are not stored."""
        if (ids := await self._database.fetch(conversations.full_tokens, turn.turn_id)) is not None:
            turn.tokens = encode_ids(ids)
            self.add_turns(live, [turn])
        return turn.tokens

    async def _store(self, session: Session) -> tuple[Session, bool]:
        for step in self._opened:
            session = step(session)
        stored, created = await self._writer.open(session)
        if created:
            self._faults.point("after_session_open")
            self._metrics.sessions.labels("created").inc()
        return stored, created

    async def _load(self, key: SessionKey, read: Callable[[], Awaitable[Session | None]]) -> LiveSession | None:
        """Return a session from memory, or else what `read` returns; calls at the same time share one read."""
        live = self.find(key)
        if live is not None:
            return live
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._remember(read))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    async def _remember(self, read: Callable[[], Awaitable[Session | None]]) -> LiveSession | None:
        stored = await read()
        if stored is None:
            return None
        live = self.live(stored)
        if stored.num_turns:
            await self.refresh(live)
        self.put(live)
        return live

    def _read_unknown(self, connection: Connection, live: LiveSession) -> tuple[list[KnownTurn], int]:
        tenant, session_id = live.key
        by_id = live.by_id()
        unknown, num_read = conversations.unknown_turns(
            connection, tenant, session_id, first=live.num_read, known=by_id
        )
        return known_turns(unknown, by_id, self.fields_read, self.describe), num_read


def known_turns(
    turns: Sequence[Turn], by_id: dict[str, KnownTurn], fields: frozenset[str], describe: Describe | None
) -> list[KnownTurn]:
    """Return stored turns with sampled tokens, in the order of their commits, as they are kept in memory.

    Args:
        turns: stored turns that are not in memory, each with the messages that it adds to its parent's.
        by_id: the session's turns in memory; these are added.
        fields: what the template prints of `NAME` and `CALL_IDS`.
        describe: returns what a feature keeps of each.
    """
    found = []
    for turn in turns:
        if len(turn.token_ids):
            parent = by_id.get(turn.parent_turn_id or "")
            digests = (message_digest(message, fields) for message in turn.messages)
            before = functools.reduce(chained, digests, b"" if parent is None else parent.messages_digest)
            known = by_id[turn.turn_id] = known_turn(turn, parent, before, describe)
            found.append(known)
    return found


def known_turn(
    turn: Turn,
    parent: KnownTurn | None,
    prompt_digest: bytes,
    describe: Describe | None,
    *,
    tokens: EncodedIds | None = None,
) -> KnownTurn:
    """Return what is kept in memory of a stored turn: what is needed to extend it.

    Args:
        turn: the turn, with the messages that it adds to its parent's.
        parent: the turn that it extends; None at the root of a chain.
        prompt_digest: the digest of its prompt's messages alone.
        describe: returns what a feature keeps of it.
        tokens: its prompt and sampled ids; None if they are to be read from the store.
    """
    calls = turn.response.get("tool_calls")
    return KnownTurn(
        turn_id=turn.turn_id,
        policy_id=turn.policy_id,
        parent_turn_id=turn.parent_turn_id,
        chain_id=turn.chain_id,
        num_messages=(0 if parent is None else parent.num_messages) + len(turn.messages) + 1,
        history_digest=turn.history_digest,
        messages_digest=turn.messages_digest,
        dialogue_digest=turn.dialogue_digest,
        prompt_digest=prompt_digest,
        reasoning=turn.response.get("reasoning") or "",
        call_ids=tuple(tool_call_ids(turn.response)) if calls else (),
        is_aborted=turn.outcome is Outcome.ABORTED,
        is_truncated=turn.sampling.get(TRUNCATION) is not None,
        about=None if describe is None else describe(turn, parent),
        parts={name: packed for name, packed in turn.parts.items() if name in PARTS and PARTS[name].is_of_prompt}
        or None,
        tokens=tokens,
    )
