"""A call's place: its session, and the turn in it that the call extends.

The session is the one that the call's session key or the request itself names (see `which`). Without a name it
is the session of the same API key that contains the conversation which the call extends (see `inferred_sessions`), or a
new session.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import uuid

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.sessions.conversation import Conversation, Prefixes, read_conversation
from proxy.sessions.digests import CALL_TEXT, NO_FIELDS, SYSTEM_ROLES, message_digest
from proxy.sessions.forest import KnownTurn
from proxy.sessions.inferred_sessions import Caller, InferredSessions
from proxy.sessions.memory import LiveSession, SessionCache
from proxy.sessions.plan import Plan, break_reason, new_chain, plan_call
from proxy.sessions.template import ChatTemplate
from proxy.sessions.which import check_has_policy, check_id, end_user, next_id, next_prefix
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import Conflict
from turnwise.store import conversations
from turnwise.store.database import Database
from turnwise.store.rewards import claim_target
from turnwise.types import Session, SessionStatus, Split

LONG_BYTES = 64 * 2**10
"""Messages of a call that leaves much freed memory."""


@dataclasses.dataclass(slots=True)
class Placement:
    """The session that a call belongs to, and how it was found."""

    live: LiveSession
    conversation: Conversation
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""
    parent: KnownTurn | None = None
    """The turn that the call extends, while it is reserved for the call."""
    repeated_by: tuple[Caller, bytes] | None = None
    """What a repetition of a request that names no session has in common with it; None for others."""


class Sessions:
    """Finds the sessions of calls, and plans the calls in them."""

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
        self.cache = SessionCache(database, writer, settings, metrics, faults or FaultPoints())
        self._database = database
        self._writer = writer
        self._settings = settings
        self._metrics = metrics
        self._reserved: collections.Counter[str] = collections.Counter()
        """Ids of the turns that running calls extend."""
        self._is_shared = settings.workers > 1
        """Whether calls of a session may reach other processes in its course."""
        self._inferred = InferredSessions(self.cache, database, settings, self._reserved)
        self._prefixes = Prefixes(settings.request_cache_bytes)
        self.num_bytes_read = 0
        """Bytes of the messages of long calls so far."""
        self.learn_template(None)

    async def find(self, call: Call, principal: Principal, request: bytes = b"") -> Placement:
        """Return the session of a call, whose parameters replace the call's; create the session if it does not exist.

        Args:
            call: the call.
            principal: its caller.
            request: the digest of its request.

        Raises:
            Conflict: the session is over, and it was named by a path or a key, or created by `POST /v1/sessions`; or
                it has another policy than the one that the call names as its model.
            InvalidRequest: the session id is not valid.
            Unauthorized: the session of a session key was deleted.
        """
        session_id, caller = call.session_id, Caller(principal.tenant, principal.key_id, call.policy_id)
        if session_id is None:
            return await self._infer(call, principal, caller, request)
        if principal.session_id is not None:
            live = await self.cache.find_own(principal)
        else:
            live = self.cache.find((principal.tenant, session_id)) or await self.cache.open(
                _opened_by_call(check_id(session_id), caller, call)
            )
        if live.session.status is not SessionStatus.OPEN:
            is_named_by_app = principal.session_id is None and call.session_source != "path"
            if not is_named_by_app or live.session.opened_by != "call":
                raise Conflict(
                    f"session {session_id!r} is {live.session.status.value}; create a new one to go on",
                    code="session_not_open",
                )
            live = await self._open_next(live, call)
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
        return Placement(live, await self._read(call, principal), inferred_by)

    async def _open_next(self, over: LiveSession, call: Call) -> LiveSession:
        """Return the open session that continues one which is over; create it if there is none.

        An application keeps the id that it has chosen, for example after an hour of silence.
        """
        tenant, name = over.key
        newest = over.newest_number
        if newest is None:
            newest = await self._database.fetch(conversations.newest_generation, tenant, next_prefix(name))
        for number in itertools.count(max(newest, 2)):
            wanted = _opened_by_call(next_id(name, number), Caller(tenant, "", over.session.policy_id), call)
            user_id = over.session.user_id if wanted.user_id is None else wanted.user_id
            wanted = dataclasses.replace(wanted, continues=next_id(name, number - 1), user_id=user_id)
            live = await self.cache.open(wanted)
            if live.session.status is SessionStatus.OPEN:
                over.newest_number = number
                return live
        raise AssertionError("an endless count has ended")

    def learn_template(self, template: ChatTemplate | None) -> None:
        """Set the template, and remove all sessions from memory, because their digests cover what it reads."""
        self.template = template
        fields = NO_FIELDS if template is None else template.fields_read
        self.cache.fields_read = fields | {CALL_TEXT} if self._settings.call_text == "ignore" else fields
        self.cache.clear()
        self._inferred.clear()
        self._prefixes.clear()

    async def _read(self, call: Call, principal: Principal) -> Conversation:
        """Compute the digests of a call's conversation, over what the served template reads."""
        if call.session_id is not None:
            owner = principal.tenant, "session", call.session_id, b""
        else:
            asked = next((each for each in call.messages if each.get("role") not in SYSTEM_ROLES), {})
            owner = principal.tenant, "key", principal.key_id, message_digest(asked)
        conversation = await read_conversation(call, self.cache.fields_read, self._prefixes, owner)
        if len(call.messages_json) >= LONG_BYTES:
            self.num_bytes_read += len(call.messages_json)
        return conversation

    async def plan(self, placement: Placement, call: Call) -> Plan:
        """Decide which turn the call extends and with which prompt; reserve that turn until `release`."""
        live, conversation, parent = placement.live, placement.conversation, placement.parent
        if not conversation.num_replied:
            if self._is_shared and live.forest.by_id:
                await self.cache.refresh(live)  # the role of a new chain depends on the session's others
            return new_chain(conversation, break_reason(conversation, live.forest))
        if not self._settings.continuation:
            return new_chain(conversation, "continuation_off")
        if parent is None:
            parent = live.forest.deepest(conversation)
            # Another proxy may have stored a longer history, or the complete reply to a retry of a call cut off here.
            if parent is None or parent.num_messages < conversation.num_replied or parent.is_aborted:
                await self.cache.refresh(live)
                parent = live.forest.deepest(conversation)
            if parent is not None:
                self._reserve(placement, parent)
        tokens = None if parent is None else await self.cache.tokens(live, parent)
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
            live = await self.cache.find_own(principal)
        elif call.session_id is not None:
            live = await self.cache.find_stored(principal.tenant, call.session_id)
        elif found := await self._inferred.find(await self._read(call, principal), caller):
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

    def release(self, placement: Placement, *, has_failed: bool = False) -> None:
        """Release the turn that a call has reserved, after the call has ended; keep the session of one that failed."""
        if has_failed and placement.repeated_by is not None and not placement.live.forest.by_id:
            self._inferred.add_unanswered(*placement.repeated_by, placement.live)
        if placement.parent is not None:
            turn_id, placement.parent = placement.parent.turn_id, None
            self._reserved[turn_id] -= 1
            if not self._reserved[turn_id]:
                del self._reserved[turn_id]

    async def _infer(self, call: Call, principal: Principal, caller: Caller, request: bytes) -> Placement:
        """Return the open session of this caller that contains what the call extends, or a new session."""
        conversation = await self._read(call, principal)
        found = await self._inferred.find(conversation, caller)
        live = await self._inferred.find_by_calls(conversation, caller) if found is None else found.live
        if live is None:
            live = await self._inferred.take_unanswered(caller, request)
        session_id = f"auto-{uuid.uuid4().hex}" if live is None else live.session.session_id
        if call.idempotency_key is not None:
            target = await self._writer.do(claim_target, *caller[:2], call.idempotency_key, session_id)
            if target != session_id:
                first = await self.cache.open(_opened_by_call(target, caller, call))
                if first.session.status is SessionStatus.OPEN:
                    return await self._place(first, call, principal, caller.key_id)
        if live is None:
            self._metrics.sessions.labels("inferred").inc()
            live = await self.cache.open(_opened_by_call(session_id, caller, call))
        placement = Placement(live, conversation, caller.key_id, repeated_by=(caller, request))
        if found is not None and found.turn.history_digest in conversation.history.full:
            self._reserve(placement, found.turn)
        return placement

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
        self.cache.add_turns(live, turns)
        if continued is not None and any(not turn.is_aborted for turn in turns):
            continued.has_child = True
        if inferred_for is not None:
            self._inferred.add(inferred_for, live, turns)


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
