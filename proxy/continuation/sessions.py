"""Sessions as the proxy holds them: a cache over the store, from which any process can rebuild any session.

Which session a call belongs to is the first of: URL path, `X-Session-Id`, the session key, `metadata.session_id`; with
none of these, the session of the same API key that holds the conversation which the call extends, or a new one.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import re
import uuid
from hashlib import blake2b

import numpy as np

from proxy.auth import Principal
from proxy.continuation.chat_template import ChatTemplate
from proxy.continuation.plan import Forest, KnownTurn, Plan, digest_call, plan_call, reply_position
from proxy.dialects.base import Call
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import Conflict, InvalidRequest
from turnwise.store import ledger, lineage, queries
from turnwise.store.database import Database
from turnwise.types import Outcome, Session, SessionStatus, TokenIds

log = logging.getLogger(__name__)
SESSION_ID = r"^[A-Za-z0-9_:@~-][A-Za-z0-9_.:@~-]{0,255}$"
"""What a session id can be: it is part of URLs and headers, so no character needs escaping, and none is `..`."""
_SESSION_ID = re.compile(SESSION_ID)


@dataclasses.dataclass(slots=True)
class LiveSession:
    """A session in memory."""

    session: Session
    forest: Forest = dataclasses.field(default_factory=Forest)


class Tips:
    """Turns whose tokens are in memory: those that calls extend, the ends of chains, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: collections.OrderedDict[str, tuple[KnownTurn, int]] = collections.OrderedDict()

    def hold(self, turn: KnownTurn) -> None:
        """Keep a new turn's tokens in place of its parent's; what was held for longest makes room."""
        self._release(turn.parent_turn_id or "")
        self._release(turn.turn_id)
        size = len(turn.tokens or b"")
        self._held[turn.turn_id] = (turn, size)
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._release(next(iter(self._held)))

    def _release(self, turn_id: str) -> None:
        held = self._held.pop(turn_id, None)
        if held is not None:
            held[0].tokens = None
            self._num_bytes -= held[1]


class Sessions:
    """Finds, opens and remembers sessions."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        settings: ProxySettings,
        metrics: Metrics,
        faults: FaultPoints | None = None,
    ) -> None:
        self._faults = faults or FaultPoints()
        self._database = database
        self._writer = writer
        self._settings = settings
        self._metrics = metrics
        self._live: collections.OrderedDict[tuple[str, str], LiveSession] = collections.OrderedDict()
        self._inferred: collections.OrderedDict[tuple[str, bytes], str] = collections.OrderedDict()
        self._tips = Tips(settings.token_cache_bytes)
        self._opening: dict[tuple[str, str], asyncio.Task[LiveSession]] = {}

    async def of_call(self, call: Call, principal: Principal) -> LiveSession:
        """Return the session of a call; one that nobody created yet is opened.

        Raises:
            Conflict: the session has ended.
            InvalidRequest: the session id cannot be one.
        """
        session_id = principal.session_id or call.session_id
        if session_id is None:
            return await self._infer(call, principal)
        live = await self.open(Session(session_id=check_id(session_id), tenant=principal.tenant))
        if live.session.status is not SessionStatus.OPEN:
            raise Conflict(
                f"session {session_id!r} is {live.session.status.value}; create a new one to go on",
                code="session_not_open",
            )
        return live

    async def open(self, session: Session) -> LiveSession:
        """Return the stored session of that id in memory, or store `session`."""
        key = (session.tenant, session.session_id)
        live = self._live.get(key)
        if live is not None:
            self._live.move_to_end(key)
            return live
        task = self._opening.get(key)
        if task is None:
            task = self._opening[key] = asyncio.create_task(self._load(session))
            task.add_done_callback(lambda _: self._opening.pop(key, None))
        return await asyncio.shield(task)

    async def _load(self, session: Session) -> LiveSession:
        stored, created = await self._writer.do(ledger.create_session, session)
        if created:
            self._faults.point("after_session_open")
            self._metrics.sessions.labels("created").inc()
        live = LiveSession(stored)
        if stored.num_turns:
            await self.refresh(live)
        self._live[stored.tenant, stored.session_id] = live
        while len(self._live) > self._settings.cache_sessions:
            self._live.popitem(last=False)
        return live

    def forget(self, tenant: str, session_id: str) -> None:
        """Drop a session from memory, because the store has changed it."""
        self._live.pop((tenant, session_id), None)

    async def refresh(self, live: LiveSession) -> None:
        """Learn the turns that other processes, or an earlier life of this one, have committed."""
        for view in await asyncio.to_thread(self._read_unknown, live):
            turn = view.turn
            live.forest.add(
                KnownTurn(
                    turn_id=turn.turn_id,
                    parent_turn_id=turn.parent_turn_id,
                    chain_id=turn.chain_id,
                    num_messages=len(view.messages) + 1,
                    history_digest=turn.history_digest,
                    messages_digest=turn.messages_digest,
                    dialogue_digest=turn.dialogue_digest,
                    reasoning=turn.response.get("reasoning") or "",
                )
            )

    def _read_unknown(self, live: LiveSession) -> list[lineage.TurnView]:
        session, known = live.session, set(live.forest.by_id)
        with self._database.read() as connection:
            index = queries.history_index(connection, session.tenant, session.session_id)
            if all(entry.turn_id in known or entry.outcome is Outcome.ERROR for entry in index):
                return []
            views, _ = queries.turns(connection, session.tenant, session.session_id, limit=len(index))
        return [view for view in views if view.turn.turn_id not in known and len(view.turn.token_ids)]

    async def plan(self, live: LiveSession, call: Call, template: ChatTemplate | None) -> Plan:
        """Decide which turn the call extends and with which prompt."""
        history, context = digest_call(call)
        replies = reply_position(call.messages)
        if not replies:
            return Plan(history=history, context=context)
        if not self._settings.continuation:
            return Plan(history=history, context=context, reason="continuation_off")
        parent = live.forest.deepest(history, replies)
        if parent is None or parent.num_messages < replies:
            await self.refresh(live)
            parent = live.forest.deepest(history, replies)
        tokens = None if parent is None else await self._tokens(parent)
        return plan_call(
            call,
            history,
            context,
            live.forest,
            template,
            tokens,
            parent,
            keep_thinking=self._settings.thinking == "keep",
        )

    async def _tokens(self, turn: KnownTurn) -> TokenIds:
        if turn.tokens is not None:
            return np.frombuffer(turn.tokens, np.int32)
        return await asyncio.to_thread(self._read_tokens, turn.turn_id)

    def _read_tokens(self, turn_id: str) -> TokenIds:
        with self._database.read() as connection:
            return queries.full_tokens(connection, turn_id)

    async def _infer(self, call: Call, principal: Principal) -> LiveSession:
        """Return the open session of this API key that holds what the call extends, or a new one."""
        call.inferred_by = principal.key_id
        held = await self._holding(call, principal)
        if held is not None and (live := await self._if_open(held, principal)):
            return live
        self._metrics.sessions.labels("inferred").inc()
        if call.idempotency_key is not None:
            # A repetition finds the session again by this name, and in it the turn, whatever was forgotten meanwhile.
            named = blake2b(f"{principal.key_id}\0{call.idempotency_key}".encode(), digest_size=16).hexdigest()
            if live := await self._if_open(f"auto-{named}", principal):
                return live
        return await self.open(Session(session_id=f"auto-{uuid.uuid4().hex}", tenant=principal.tenant))

    async def _if_open(self, session_id: str, principal: Principal) -> LiveSession | None:
        """Return a session unless it is over: who named none cannot know that."""
        live = await self.open(Session(session_id=session_id, tenant=principal.tenant))
        return live if live.session.status is SessionStatus.OPEN else None

    async def _holding(self, call: Call, principal: Principal) -> str | None:
        """Return the session that holds the longest part of the call's conversation.

        Memory is believed for all of it up to the last reply; for less, the store may know better.
        """
        replies = reply_position(call.messages)
        if not replies:
            return None
        history, _ = digest_call(call)
        remembered = self._inferred.get((principal.key_id, history.full[replies - 1]))
        if remembered is not None:
            return remembered
        digests = [
            history.full[end] for end in range(replies - 1, -1, -1) if call.messages[end].get("role") == "assistant"
        ]

        def read() -> str | None:
            with self._database.read() as connection:
                return queries.session_of_conversation(connection, principal.tenant, principal.key_id, digests)

        return await asyncio.to_thread(read)

    def remember(self, live: LiveSession, turns: list[KnownTurn], *, inferred_for: str | None) -> None:
        """Add committed turns, so that the next call can extend them.

        Args:
            live: their session.
            turns: what was committed.
            inferred_for: the key, where its calls name no session and must be found by their conversation.
        """
        for turn in turns:
            live.forest.add(turn)
            self._tips.hold(turn)
            if inferred_for is not None:
                self._inferred[inferred_for, turn.history_digest] = live.session.session_id
        while len(self._inferred) > self._settings.cache_sessions:
            self._inferred.popitem(last=False)


def check_id(session_id: object) -> str:
    """Return the id if it can be one.

    Raises:
        InvalidRequest: when it is empty, too long, or holds a character that does not belong in a URL's path.
    """
    if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            "a session id has 1 to 256 ASCII letters, digits or any of -_.:@~, and does not start with a dot, "
            f"not {session_id!r:.80}",
            param="session_id",
        )
    return session_id
