"""The sessions of a proxy: a cache over the store, so that any process can continue any session.

The session of a call is the one that its session key or the request itself names (see `which_session`). Without a name
it is the session of the same API key that contains the conversation which the call extends, or a new session.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable

import cachetools

from proxy.auth import Principal, session_deleted
from proxy.continuation.conversation import Conversation, Prefixes, read_conversation
from proxy.continuation.digests import CALL_TEXT, NO_FIELDS, SYSTEM_ROLES, message_digest, tool_call_ids
from proxy.continuation.encoded_ids import EncodedIds, encode_ids
from proxy.continuation.forest import KnownTurn
from proxy.continuation.memory import LiveSession, LiveSessions, Placement, known_turns
from proxy.continuation.plan import Plan, break_reason, new_chain, plan_call
from proxy.continuation.template import ChatTemplate
from proxy.continuation.which_session import (
    Caller,
    Candidate,
    InferredSessions,
    check_has_policy,
    check_id,
    choose_candidate,
    end_user,
    next_id,
    next_prefix,
)
from proxy.dialects.base import Call
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import Conflict, NotFound
from turnwise.store import forks, history, queries
from turnwise.store.database import Connection, Database
from turnwise.store.idempotency import claim_target
from turnwise.types import Session, SessionKey, SessionStatus, Split

log = logging.getLogger(__name__)
LONG_BYTES = 64 * 2**10
"""Messages of a call that leaves much freed memory."""
MAX_CANDIDATES = 16
"""Sessions with the same conversation that are compared, the newest ones."""


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
        self.template: ChatTemplate | None = None
        """The served model's chat template; None until an engine has reported its model."""
        self._faults = faults or FaultPoints()
        self._database = database
        self._writer = writer
        self._settings = settings
        self._metrics = metrics
        self._inferred = InferredSessions(settings.cache_sessions)
        self._generations: cachetools.LRUCache[SessionKey, int] = cachetools.LRUCache(settings.cache_sessions)
        """Number of the newest session that continues one which is over; of as many sessions as are in memory."""
        self._reserved: collections.Counter[str] = collections.Counter()
        """Ids of the turns that running calls extend."""
        self._is_shared = settings.workers > 1
        """Whether calls of a session may reach other processes in its course."""
        self._live = LiveSessions(settings.cache_sessions, settings.session_cache_bytes, settings.token_cache_bytes)
        self._prefixes = Prefixes(settings.request_cache_bytes)
        self.num_bytes_read = 0
        """Bytes of the messages of long calls so far."""
        self._loading: dict[SessionKey, asyncio.Task[LiveSession | None]] = {}

    async def find(self, call: Call, principal: Principal) -> Placement:
        """Return the session of a call, whose parameters replace the call's; create the session if it does not exist.

        Raises:
            Conflict: the session is over, and it was named by a path or a key, or created by `POST /v1/sessions`; or
                it has another policy than the one that the call names as its model.
            InvalidRequest: the session id is not valid.
            Unauthorized: the session of a session key was deleted.
        """
        session_id = principal.session_id or call.session_id
        caller = Caller(principal.tenant, principal.key_id, call.policy_id)
        if session_id is None:
            return await self._infer(call, principal, caller)
        live = self._live.find((principal.tenant, session_id))
        if principal.session_id is not None:
            live = await self.find_own(principal)
        elif live is None:
            live = await self.open(_opened_by_call(check_id(session_id), caller, call))
        if live.session.status is not SessionStatus.OPEN:
            is_named_by_app = principal.session_id is None and call.session_source != "path"
            if not is_named_by_app or live.session.opened_by != "call":
                raise Conflict(
                    f"session {session_id!r} is {live.session.status.value}; create a new one to go on",
                    code="session_not_open",
                )
            live = await self._open_next(live.session, call)
        return await self._place(live, call, principal)

    async def _place(
        self, live: LiveSession, call: Call, principal: Principal, inferred_by: str | None = None
    ) -> Placement:
        """Place a call in a session.

        Pinned parameters replace the call's before its conversation is read, because the template prints some of them.
        """
        if call.names_policy:
            check_has_policy(live.session, call.policy_id, call.model, param="model")
        if sampling := live.session.sampling:
            call.body = {**call.body, **sampling}
        return Placement(live, await self.read_conversation(call, principal), inferred_by)

    async def _open_next(self, over: Session, call: Call) -> LiveSession:
        """Return the open session that continues one which is over; create it if there is none.

        An application keeps the id that it has chosen, for example after an hour of silence.
        """
        name = (over.tenant, over.session_id)
        newest = self._generations.get(name)
        if newest is None:
            newest = await self._database.fetch(history.newest_generation, over.tenant, next_prefix(over.session_id))
        for number in itertools.count(max(newest, 2)):
            session_id, before = next_id(over.session_id, number), next_id(over.session_id, number - 1)
            wanted = _opened_by_call(session_id, Caller(over.tenant, "", over.policy_id), call)
            user_id = over.user_id if wanted.user_id is None else wanted.user_id
            live = await self.open(dataclasses.replace(wanted, continues=before, user_id=user_id))
            if live.session.status is SessionStatus.OPEN:
                self._generations[name] = number
                return live
        raise AssertionError("an endless count has ended")

    async def create(self, session: Session) -> Session:
        """Store `session` if there is none with this id; return what is stored.

        It does not trust the memory: another proxy may have deleted the session.
        """
        stored, created = await self._store(session)
        live = self._live.find((session.tenant, session.session_id))
        if live is not None and live.session.created_at != stored.created_at:
            self.forget(*live.key)
        if created:
            self._live.put(LiveSession(stored))
        return stored

    async def fork(self, session: Session, turn_id: str, *, before: bool, is_sampled_here: bool = False) -> Session:
        """Store `session` with copies of a turn and its ancestors, in short transactions; see `store.forks`."""
        path, num_copied = await self._database.fetch(forks.read_path, session, turn_id, before=before)
        root_id = path[0] if path else None
        sampled_here = turn_id if is_sampled_here else None
        while True:
            some = path[num_copied : num_copied + forks.SLICE_TURNS]
            async with self._writer.slices:
                stored, num_more = await self._writer.do(forks.copy_turns, session, root_id, some, sampled_here)
            num_copied += num_more
            if num_copied == len(path):
                self.forget(session.tenant, session.session_id)
                return stored

    async def open(self, session: Session) -> LiveSession:
        """Return the session with this id; store `session` if there is none."""

        async def read() -> Session:
            return (await self._store(session))[0]

        while True:
            live = await self._load((session.tenant, session.session_id), read)
            if live is not None:  # not the result of a search that began before
                return live

    async def find_stored(self, tenant: str, session_id: str) -> LiveSession | None:
        """Return the session with this id from memory or from the store; None if there is none."""

        async def read() -> Session | None:
            with contextlib.suppress(NotFound):
                return await self._database.fetch(queries.session, tenant, session_id)
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
            self.forget(*live.key)
            live = await self.find_stored(principal.tenant, principal.session_id)
        if live is None or not principal.owns(live.session):
            raise session_deleted(principal.session_id)
        return live

    async def _store(self, session: Session) -> tuple[Session, bool]:
        stored, created = await self._writer.open(session)
        if created:
            self._faults.point("after_session_open")
            self._metrics.sessions.labels("created").inc()
        return stored, created

    async def _load(self, key: SessionKey, read: Callable[[], Awaitable[Session | None]]) -> LiveSession | None:
        """Return a session from memory, or else what `read` returns; calls at the same time share one read."""
        live = self._live.find(key)
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
        live = LiveSession(stored)
        if stored.num_turns:
            await self.refresh(live)
        self._live.put(live)
        return live

    def learn_template(self, template: ChatTemplate | None) -> None:
        """Set the template, and remove all sessions from memory, because its digests cover what it reads."""
        self.template = template
        self._inferred.clear()
        self._live.clear()
        self._prefixes.clear()

    def forget(self, tenant: str, session_id: str) -> None:
        """Remove a session from memory because its row in the store has changed."""
        self._live.drop((tenant, session_id))

    async def refresh(self, live: LiveSession) -> None:
        """Add the turns that other processes have committed, or this process before a restart."""
        found, live.num_read = await self._database.fetch(self._read_unknown, live)
        # Some may have been committed here meanwhile.
        self._live.add_turns(live, [turn for turn in found if turn.turn_id not in live.forest.by_id])

    def _read_unknown(self, connection: Connection, live: LiveSession) -> tuple[list[KnownTurn], int]:
        """Return the stored turns that are not in memory, and the `seq` after the last stored turn."""
        tenant, session_id = live.key
        by_id = dict(live.forest.by_id)
        unknown, num_read = history.unknown_turns(connection, tenant, session_id, first=live.num_read, known=by_id)
        return known_turns(unknown, by_id, self.fields_read), num_read

    @property
    def fields_read(self) -> frozenset[str]:
        """What the served template prints beside roles, text and tool calls."""
        fields = NO_FIELDS if self.template is None else self.template.fields_read
        return fields | {CALL_TEXT} if self._settings.call_text == "ignore" else fields

    async def read_conversation(self, call: Call, principal: Principal | None = None) -> Conversation:
        """Compute the digests of a call's conversation, over what the served template reads.

        Args:
            call: the call.
            principal: its caller; None if nothing is used again.
        """
        owner = None
        if principal is not None:
            session_id = principal.session_id or call.session_id
            if session_id is not None:
                owner = principal.tenant, "session", session_id, b""
            else:
                asked = next((each for each in call.messages if each.get("role") not in SYSTEM_ROLES), {})
                owner = principal.tenant, "key", principal.key_id, message_digest(asked)
        conversation = await read_conversation(call, self.fields_read, self._prefixes, owner)
        if len(call.messages_json) >= LONG_BYTES:
            self.num_bytes_read += len(call.messages_json)
        return conversation

    async def plan(self, placement: Placement, call: Call) -> Plan:
        """Decide which turn the call extends and with which prompt; reserve that turn until `release`."""
        live, conversation, parent = placement.live, placement.conversation, placement.parent
        if not conversation.num_replied:
            if self._is_shared and live.forest.by_id:
                await self.refresh(live)  # the role of a new chain depends on the session's others
            return new_chain(conversation, break_reason(conversation, live.forest))
        if not self._settings.continuation:
            return new_chain(conversation, "continuation_off")
        if parent is None:
            parent = live.forest.deepest(conversation)
            # Another proxy may have stored a longer history, or the complete reply to a retry of a call cut off here.
            if parent is None or parent.num_messages < conversation.num_replied or parent.is_aborted:
                await self.refresh(live)
                parent = live.forest.deepest(conversation)
            if parent is not None:
                self._reserve(placement, parent)
        tokens = None if parent is None else await self._tokens(live, parent)
        keep_thinking = self._settings.thinking == "keep"
        return await plan_call(
            call, conversation, live.forest, self.template, parent, tokens, keep_thinking=keep_thinking
        )

    async def continued_length(self, call: Call, principal: Principal) -> int | None:
        """Return the number of prompt tokens of a call that would extend a stored turn; None if it extends none.

        It stores nothing: a session that does not exist is not created.
        """
        caller, live = Caller(principal.tenant, principal.key_id, call.policy_id), None
        if principal.session_id is not None:
            live = await self.find_own(principal)
        elif call.session_id is not None:
            live = await self.find_stored(principal.tenant, call.session_id)
        elif found := await self._find_by_conversation(await self.read_conversation(call, principal), caller):
            live = found.live
        if live is None or live.session.status is not SessionStatus.OPEN:
            return None
        placement = await self._place(live, call, principal)
        try:
            plan = await self.plan(placement, call)
        finally:
            self.release(placement)
        return None if plan.prompt is None else plan.prompt.num_ids

    def _reserve(self, placement: Placement, parent: KnownTurn) -> None:
        placement.parent = parent
        self._reserved[parent.turn_id] += 1

    def release(self, placement: Placement) -> None:
        """Release the turn that a call has reserved, after the call has ended."""
        if placement.parent is not None:
            turn_id, placement.parent = placement.parent.turn_id, None
            self._reserved[turn_id] -= 1
            if not self._reserved[turn_id]:
                del self._reserved[turn_id]

    async def _tokens(self, live: LiveSession, turn: KnownTurn) -> EncodedIds:
        tokens = turn.tokens
        if tokens is None:
            turn.tokens = tokens = encode_ids(await self._database.fetch(history.full_tokens, turn.turn_id))
            self._live.keep_tokens(live, turn)
        return tokens

    async def _infer(self, call: Call, principal: Principal, caller: Caller) -> Placement:
        """Return the open session of this caller that contains what the call extends, or a new session."""
        conversation = await self.read_conversation(call, principal)
        found = await self._find_by_conversation(conversation, caller)
        live = await self._find_by_calls(conversation, caller) if found is None else found.live
        session_id = f"auto-{uuid.uuid4().hex}" if live is None else live.session.session_id
        if call.idempotency_key is not None:
            target = await self._writer.do(claim_target, *caller[:2], call.idempotency_key, session_id)
            if target != session_id:
                first = await self.open(_opened_by_call(target, caller, call))
                if first.session.status is SessionStatus.OPEN:
                    return await self._place(first, call, principal, caller.key_id)
        if live is None:
            self._metrics.sessions.labels("inferred").inc()
            live = await self.open(_opened_by_call(session_id, caller, call))
        placement = Placement(live, conversation, caller.key_id)
        if found is not None and found.turn.history_digest in conversation.history.full:
            self._reserve(placement, found.turn)
        return placement

    async def _find_by_calls(self, conversation: Conversation, caller: Caller) -> LiveSession | None:
        """Return the newest open session that sampled one of the repeated tool calls: the client has cut its history.

        An id that several sessions sampled says nothing: some models number their calls.
        """
        for message in reversed(conversation.messages):
            for call_id in tool_call_ids(message):
                sessions = self._inferred.find(caller, call_id.encode())
                if len(sessions) == 1 and (live := await self._if_open(sessions[0], caller)):
                    return live
        return None

    async def _if_open(self, session_id: str, caller: Caller) -> LiveSession | None:
        """Return a session if it is open: a caller that names no session cannot know that it has ended."""
        live = await self.find_stored(caller.tenant, session_id)
        if live is None or live.session.status is not SessionStatus.OPEN:
            return None
        return live if live.session.policy_id == caller.policy_id else None

    async def _find_by_conversation(self, conversation: Conversation, caller: Caller) -> Candidate | None:
        """Return the session that contains the longest part of the conversation, where that is decidable.

        A match in memory up to the last reply is used at once; otherwise the store may have a better one.
        """
        digests = conversation.after_replies(conversation.history.full)
        if not digests:
            return None
        call_ids = conversation.call_ids()
        candidates = await self._candidates(self._inferred.find(caller, digests[0]), digests[0], caller)
        chosen = choose_candidate(candidates, call_ids, self._reserved, is_complete=False)
        # Another worker may have extended it, and another proxy may have completed a reply that was cut off here.
        if chosen is not None and not self._is_shared and not chosen.turn.is_aborted:
            return chosen
        is_handoff, digest, stored = await self._database.fetch(_read_candidates, caller, conversation)
        candidates = await self._candidates(stored, digest, caller, refresh=True)
        # Of a handoff only the dialogue is equal: it does not branch from a turn that another call has extended.
        return choose_candidate(candidates, call_ids, self._reserved, is_complete=not is_handoff)

    async def _candidates(
        self, session_ids: Iterable[str], digest: bytes, caller: Caller, *, refresh: bool = False
    ) -> list[Candidate]:
        """Return the open sessions of these that contain the conversation."""
        found = []
        for session_id in session_ids:
            live = await self._if_open(session_id, caller)
            if live is None:
                continue
            if refresh:
                await self.refresh(live)
            forest = live.forest
            turns = forest.by_history.get(digest) or forest.by_dialogue.get(digest, ())
            found += [Candidate(live, turn) for turn in turns]
        return found

    def remember(
        self, live: LiveSession, turns: list[KnownTurn], *, inferred_for: str | None, continued: KnownTurn | None = None
    ) -> None:
        """Add committed turns, so that the next call can extend them.

        Args:
            live: their session.
            turns: the committed turns.
            inferred_for: the API key whose calls find these turns by their conversation; None for a named session.
            continued: the turn that their call went on from, also where it starts a new chain.
        """
        self._live.add_turns(live, turns)
        if continued is not None and any(not turn.is_aborted for turn in turns):
            continued.has_child = True
        if inferred_for is not None:
            caller = Caller(live.session.tenant, inferred_for, live.session.policy_id)
            for turn in turns:
                self._inferred.add(caller, turn.history_digest, live.session.session_id)
                for call_id in turn.call_ids:
                    self._inferred.add(caller, call_id.encode(), live.session.session_id)


def _read_candidates(
    connection: Connection, caller: Caller, conversation: Conversation
) -> tuple[bool, bytes, list[str]]:
    """Return the sessions with the conversation; else those with its dialogue under other tools or another system.

    Returns:
        Whether only the dialogue is equal, its digest, and the ids of the sessions.
    """
    find = functools.partial(
        history.sessions_of_conversation,
        connection,
        caller.tenant,
        caller.key_id,
        policy_id=caller.policy_id,
        limit=MAX_CANDIDATES,
    )
    digest, session_ids = find(conversation.after_replies(conversation.history.full))
    if session_ids:
        return False, digest, session_ids
    return True, *find(conversation.after_replies(conversation.history.dialogue), by="dialogue_digest")


def _opened_by_call(session_id: str, caller: Caller, call: Call) -> Session:
    """Return a new session that nobody has created explicitly; one of a version that its call names is not trained."""
    return Session(
        session_id=session_id,
        tenant=caller.tenant,
        policy_id=caller.policy_id,
        split=Split.TRAIN if call.policy_version is None else Split.EVAL,
        user_id=end_user(call),
        opened_by="call",
    )
