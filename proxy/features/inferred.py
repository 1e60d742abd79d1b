"""The session of a call that names none: that of the same API key whose conversation the call continues.

Parallel rollouts of one task may send equal prompts and get equal replies. The ids of tool calls are unique to a run
and come back with the next request. Without them, runs with equal conversations are interchangeable, so each one
continues a turn that nothing extends yet. If every candidate has been extended, the choice is not decidable.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import cachetools

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.features.roles.chains import side_task
from proxy.features.roles.prompts import ASKS_FOR_SUMMARY
from proxy.sessions.conversation import ConversationDigests, tool_call_ids
from proxy.sessions.forest import KnownTurn, repeated_calls
from proxy.sessions.memory import MAX_SESSIONS, LiveSession
from proxy.sessions.place import Caller, CallPlace, Sessions, Unnamed, opened_by_call
from turnwise.features import inferred, summaries
from turnwise.store.database import Connection
from turnwise.types import Json, Session, SessionStatus

MAX_CANDIDATES = 16
"""Sessions with the same conversation that are compared, the newest ones."""
MAX_COMPARED = 1_000
"""Sessions with the same conversation that one call is compared with, the newest ones."""


Candidate: TypeAlias = tuple[LiveSession, KnownTurn]
"""A session that contains the conversation, and the turn that the call would extend in it."""


class SessionIds(cachetools.LRUCache[tuple[Caller, bytes], tuple[str, ...]]):
    """Keeps ids of sessions by their conversations, up to a number in all; the least recently used are dropped."""

    def __init__(self, max_ids: int) -> None:
        super().__init__(max_ids, len)
        self._max_of_conversation = min(MAX_COMPARED, max_ids)

    def find(self, caller: Caller, digest: bytes) -> tuple[str, ...]:
        """Return the sessions of this caller that contain the conversation with this digest, the oldest first."""
        return self.get((caller, digest), ())

    def add(self, caller: Caller, digest: bytes, session_id: str) -> None:
        session_ids = self.find(caller, digest)
        if session_id not in session_ids:
            self[caller, digest] = (*session_ids, session_id)[-self._max_of_conversation :]


class Inferred(Unnamed):
    """Finds sessions by the conversations and the tool calls that they contain."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__(sessions)
        self._ids = SessionIds(MAX_SESSIONS)
        """By the conversations of the turns that were committed here, and by the ids of their tool calls."""
        self._unanswered = SessionIds(MAX_SESSIONS)
        """Those whose only calls failed before a token was sampled, by the digest of the request."""
        self._summed_up = SessionIds(MAX_SESSIONS)
        """Those that were asked for a summary here, from which a new context may go on."""

    def remember(self, key_id: str, live: LiveSession, turns: Iterable[KnownTurn]) -> None:
        """Let calls of an API key find a session by these turns."""
        session = live.session
        for turn in turns:
            caller = session.tenant, key_id, turn.policy_id
            self._ids.add(caller, turn.history_digest, session.session_id)
            for call_id in turn.call_ids:
                self._ids.add(caller, call_id.encode(), session.session_id)

    def failed(self, place: CallPlace, caller: Caller, request: bytes) -> None:
        if not place.live.by_id():
            self._unanswered.add(caller, request, place.live.session.session_id)

    async def place(self, call: Call, principal: Principal, caller: Caller, request: bytes) -> CallPlace:
        """Return the open session of this caller that contains what the call extends, or a new session."""
        sessions = self.sessions
        conversation = await self._read(call, principal, caller)
        live, turn = await self._find(conversation, call.messages, caller) or (None, None)
        if live is None:
            live = await self.find_by_calls(call.messages, caller)
        if live is None:
            live = await self._find_summed_up(call.messages, caller)
        if live is None:
            live = await self.take_unanswered(caller, request)
        session_id = f"auto-{uuid.uuid4().hex}" if live is None else live.session.session_id
        if call.idempotency_key is not None:
            target = await sessions.writer.do(inferred.claim_target, *caller[:2], call.idempotency_key, session_id)
            if target != session_id:
                first = await sessions.cache.open(opened_by_call(target, caller, call))
                if first.session.status is SessionStatus.OPEN:
                    return await sessions.place_in(first, call, principal, principal.key_id)
        if live is None:
            sessions.metrics.sessions.labels("inferred").inc()
            live = await sessions.cache.open(opened_by_call(session_id, caller, call))
        if side_task(call.messages, call.tools, call.body) == ASKS_FOR_SUMMARY:
            self._summed_up.add(caller, b"", session_id)
        place = await sessions.place_in(live, call, principal, principal.key_id, conversation)
        place.repeated_by = caller, request
        is_own = turn is not None and turn.turn_id in place.forest.by_id
        if turn is not None and is_own and turn.history_digest in place.conversation.full:
            place.reserved = turn
            sessions.reserved[turn.turn_id] += 1
        return place

    async def find(self, call: Call, principal: Principal, caller: Caller) -> LiveSession | None:
        found = await self._find(await self._read(call, principal, caller), call.messages, caller)
        return None if found is None else found[0]

    async def _read(self, call: Call, principal: Principal, caller: Caller) -> ConversationDigests:
        """Read a call's conversation as its turn has it in a session without pins of its own; the call stays as it is.

        A call that names no session is looked for by it, before its session is known.
        """
        asked, notes, named_later = call.body, call.notes, _named_later(caller)
        for enter in self.sessions.cache.entered(named_later):
            enter(call, named_later, principal.root_key_id)
        try:
            return await self.sessions.conversations.read(call, principal, self.sessions.cache.fields_read)
        finally:
            call.body, call.notes = asked, notes

    async def take_unanswered(self, caller: Caller, request: bytes) -> LiveSession | None:
        """Return the open session of a failed request, once: parallel rollouts send equal requests."""
        while session_ids := self._unanswered.pop((caller, request), ()):
            for session_id in session_ids[1:]:
                self._unanswered.add(caller, request, session_id)
            live = await self._if_open(session_ids[0], caller)
            if live is not None and not live.by_id():
                return live
        return None

    def clear(self) -> None:
        self._ids.clear()
        self._unanswered.clear()
        self._summed_up.clear()

    async def _find(
        self, conversation: ConversationDigests, messages: Sequence[Json], caller: Caller
    ) -> Candidate | None:
        """Return the session that contains the longest part of the conversation, where that is decidable.

        A match in memory up to the last reply is used at once; otherwise the store may have a better one.
        """
        digests = _after_replies(conversation, conversation.full)
        if not digests:
            return None
        call_ids = repeated_calls(messages)
        candidates = await self._candidates(self._ids.find(caller, digests[0]), digests[0], caller)
        chosen = self._choose(candidates, call_ids, is_complete=False)
        # Another worker may have extended it, and another proxy may have completed a reply that was cut off here.
        if chosen is not None and not self.sessions.is_shared and not chosen[1].is_aborted:
            return chosen
        is_handoff, digest, stored = await self.sessions.database.fetch(_read_candidates, caller, conversation)
        candidates = await self._candidates(stored, digest, caller, refresh=True)
        # A handoff, with an equal dialogue only, does not branch from a turn that another call has extended.
        return self._choose(candidates, call_ids, is_complete=not is_handoff)

    def _choose(
        self, candidates: Sequence[Candidate], call_ids: frozenset[str], *, is_complete: bool
    ) -> Candidate | None:
        """Return the candidate that the call continues; None where that is not decidable.

        Args:
            candidates: the oldest first.
            call_ids: ids of the tool calls that the conversation repeats.
            is_complete: whether these are all candidates of the store, not only those in memory.
        """
        candidates = [(live, turn) for live, turn in candidates if not turn.is_aborted] or candidates
        known_ids = [live.forests[turn.policy_id].call_ids(turn) for live, turn in candidates]
        same_run = [candidate for candidate, ids in zip(candidates, known_ids, strict=True) if ids & call_ids]
        is_other_run = bool(call_ids) and any(known_ids)
        if not same_run and is_other_run and not is_complete:
            return None
        alike = same_run or candidates
        free = [
            (live, turn) for live, turn in alike if not turn.has_child and turn.turn_id not in self.sessions.reserved
        ]
        num_sessions = len({live.session.session_id for live, _ in candidates})
        is_branch = is_complete and num_sessions == 1 and not is_other_run
        if free or same_run or is_branch:
            return (free or alike)[-1]
        return None

    async def find_by_calls(self, messages: Sequence[Json], caller: Caller) -> LiveSession | None:
        """Return the newest open session that sampled one of the repeated tool calls: the client has cut its history.

        An id that several sessions sampled says nothing: some models number their calls.
        """
        for message in reversed(messages):
            for call_id in tool_call_ids(message):
                sessions = self._ids.find(caller, call_id.encode())
                if len(sessions) == 1 and (live := await self._if_open(sessions[0], caller)):
                    return live
        return None

    async def _find_summed_up(self, messages: Sequence[Json], caller: Caller) -> LiveSession | None:
        """Return the open session with a summary that the messages go on from: all else of it may be left out."""
        session_ids = self._summed_up.find(caller, b"")[-MAX_CANDIDATES:]
        if not session_ids:
            return None
        find = summaries.session_summed_up
        found = await self.sessions.database.fetch(find, caller[0], session_ids, messages)
        return None if found is None else await self._if_open(found, caller)

    async def _if_open(self, session_id: str, caller: Caller) -> LiveSession | None:
        """Return a session if it is open: a caller that names no session cannot know that it has ended."""
        live = await self.sessions.cache.find_stored(caller[0], session_id)
        return None if live is None or live.session.status is not SessionStatus.OPEN else live

    async def _candidates(
        self, session_ids: Iterable[str], digest: bytes, caller: Caller, *, refresh: bool = False
    ) -> list[Candidate]:
        found: list[Candidate] = []
        for session_id in session_ids:
            live = await self._if_open(session_id, caller)
            if live is None:
                continue
            if refresh:
                await self.sessions.cache.refresh(live)
            for forest in (live.forests[caller[2]], live.forests[live.session.policy_id], *live.forests.values()):
                if turns := forest.by_history.get(digest) or forest.by_dialogue.get(digest, ()):
                    found += [(live, turn) for turn in turns]
                    break
        return found


def _after_replies(conversation: ConversationDigests, digests: list[bytes]) -> list[bytes]:
    """Return those of the digests that end with a reply, the longest conversation first."""
    return [digests[end] for end in reversed(conversation.replies)]


@functools.lru_cache(MAX_COMPARED)
def _named_later(caller: Caller) -> Session:
    tenant, _, policy_id = caller
    return Session(session_id="", tenant=tenant, policy_id=policy_id)


def _read_candidates(
    connection: Connection, caller: Caller, conversation: ConversationDigests
) -> tuple[bool, bytes, list[str]]:
    """Return the sessions with the conversation; else those with its dialogue, which another agent goes on with.

    That has other tools, another system message, or as the last choice another policy.

    Returns:
        Whether only the dialogue is equal, its digest, and the ids of the sessions.
    """
    tenant, key_id, policy_id = caller
    find = functools.partial(inferred.sessions_of_conversation, connection, tenant, key_id, limit=MAX_CANDIDATES)
    digest, session_ids = find(_after_replies(conversation, conversation.full), policy_id=policy_id)
    if session_ids:
        return False, digest, session_ids
    find_dialogue = functools.partial(find, _after_replies(conversation, conversation.dialogue), by="dialogue_digest")
    digest, session_ids = find_dialogue(policy_id=policy_id)
    return True, *((digest, session_ids) if session_ids else find_dialogue(policy_id=None))
