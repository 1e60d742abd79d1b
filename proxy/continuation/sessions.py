"""The sessions of a proxy: a cache over the store, so that any process can continue any session.

The session of a call is the first of: URL path, `X-Session-Id`, the session key, `metadata.session_id`. Without any of
these it is the session of the same API key that contains the conversation which the call extends, or a new session.
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
from proxy.continuation.conversation import Conversation
from proxy.continuation.plan import Forest, KnownTurn, Plan, plan_call
from proxy.continuation.token_cache import TokenCache
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
"""Valid session ids. They are part of URLs and headers, so no character needs escaping, and no id is `..`."""
_SESSION_ID = re.compile(SESSION_ID)


@dataclasses.dataclass(slots=True)
class LiveSession:
    """A session in memory."""

    session: Session
    forest: Forest = dataclasses.field(default_factory=Forest)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """The session that a call belongs to, and how it was found."""

    live: LiveSession
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""


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
        self._token_cache = TokenCache(settings.token_cache_bytes)
        self._opening: dict[tuple[str, str], asyncio.Task[LiveSession]] = {}

    async def find(self, call: Call, conversation: Conversation, principal: Principal) -> Placement:
        """Return the session of a call; create the session if it does not exist.

        Raises:
            Conflict: the session has ended.
            InvalidRequest: the session id is not valid.
        """
        session_id = principal.session_id or call.session_id
        if session_id is None:
            return Placement(await self._infer(call, conversation, principal), principal.key_id)
        live = await self.open(Session(session_id=check_id(session_id), tenant=principal.tenant))
        if live.session.status is not SessionStatus.OPEN:
            raise Conflict(
                f"session {session_id!r} is {live.session.status.value}; create a new one to go on",
                code="session_not_open",
            )
        return Placement(live)

    async def open(self, session: Session) -> LiveSession:
        """Return the session with this id; store `session` if there is none."""
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
        """Remove a session from memory because its row in the store has changed."""
        self._live.pop((tenant, session_id), None)

    async def refresh(self, live: LiveSession) -> None:
        """Add the turns that other processes have committed, or this process before a restart."""
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

    async def plan(
        self, live: LiveSession, call: Call, conversation: Conversation, template: ChatTemplate | None
    ) -> Plan:
        """Decide which turn the call extends and with which prompt."""
        if not conversation.num_replied:
            return Plan(history=conversation.history)
        if not self._settings.continuation:
            return Plan(history=conversation.history, reason="continuation_off")
        parent = live.forest.deepest(conversation)
        if parent is None or parent.num_messages < conversation.num_replied:
            await self.refresh(live)
            parent = live.forest.deepest(conversation)
        tokens = None if parent is None else await self._tokens(parent)
        keep_thinking = self._settings.thinking == "keep"
        return plan_call(call, conversation, live.forest, template, parent, tokens, keep_thinking=keep_thinking)

    async def _tokens(self, turn: KnownTurn) -> TokenIds:
        if turn.tokens is not None:
            return np.frombuffer(turn.tokens, np.int32)
        return await asyncio.to_thread(self._read_tokens, turn.turn_id)

    def _read_tokens(self, turn_id: str) -> TokenIds:
        with self._database.read() as connection:
            return queries.full_tokens(connection, turn_id)

    async def _infer(self, call: Call, conversation: Conversation, principal: Principal) -> LiveSession:
        """Return the open session of this API key that contains what the call extends, or a new session."""
        found = await self._find_by_conversation(conversation, principal)
        if found is not None and (live := await self._if_open(found, principal)):
            return live
        self._metrics.sessions.labels("inferred").inc()
        if call.idempotency_key is not None:
            # A retry derives the same id, so it finds the session and its turn even after a restart.
            named = blake2b(f"{principal.key_id}\0{call.idempotency_key}".encode(), digest_size=16).hexdigest()
            if live := await self._if_open(f"auto-{named}", principal):
                return live
        return await self.open(Session(session_id=f"auto-{uuid.uuid4().hex}", tenant=principal.tenant))

    async def _if_open(self, session_id: str, principal: Principal) -> LiveSession | None:
        """Return a session if it is open: a caller that names no session cannot know that it has ended."""
        live = await self.open(Session(session_id=session_id, tenant=principal.tenant))
        return live if live.session.status is SessionStatus.OPEN else None

    async def _find_by_conversation(self, conversation: Conversation, principal: Principal) -> str | None:
        """Return the session that contains the longest part of the conversation.

        A match in memory up to the last reply is used at once; for a shorter match the store may have a longer one.
        """
        digests = conversation.replied_digests()
        if not digests:
            return None
        cached = self._inferred.get((principal.key_id, digests[0]))
        if cached is not None:
            return cached

        def read() -> str | None:
            with self._database.read() as connection:
                return queries.session_of_conversation(connection, principal.tenant, principal.key_id, digests)

        return await asyncio.to_thread(read)

    def remember(self, live: LiveSession, turns: list[KnownTurn], *, inferred_for: str | None) -> None:
        """Add committed turns, so that the next call can extend them.

        Args:
            live: their session.
            turns: the committed turns.
            inferred_for: the API key whose calls find these turns by their conversation; None for a named session.
        """
        for turn in turns:
            live.forest.add(turn)
            self._token_cache.add(turn)
            if inferred_for is not None:
                self._inferred[inferred_for, turn.history_digest] = live.session.session_id
        while len(self._inferred) > self._settings.cache_sessions:
            self._inferred.popitem(last=False)


def check_id(session_id: object) -> str:
    """Return the id if it is valid.

    Raises:
        InvalidRequest: when it is empty, too long, or contains a character that needs escaping in a URL.
    """
    if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            "a session id has 1 to 256 ASCII letters, digits or any of -_.:@~, and does not start with a dot, "
            f"not {session_id!r:.80}",
            param="session_id",
        )
    return session_id
