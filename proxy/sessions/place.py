"""A call's place: its session, the turn that it extends or why it extends none, and the exact prompt ids.

The session is the one that the call's session key or the request itself names (see `which`). Without a name it is the
session of the same API key that contains the conversation which the call extends where a feature finds it, or a new
session. In its session a request extends the deepest turn whose messages and reply it repeats; its prompt is that
turn's stored tokens followed by what the template renders after the reply. A call that extends no stored turn starts a
new chain. If its conversation contains replies, its place names the reason.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from proxy.auth import Principal
from proxy.dialects.base import Call, template_arguments
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.sessions.conversation import (
    CALL_TEXT,
    NO_FIELDS,
    ConversationDigests,
    Conversations,
    context_digest,
)
from proxy.sessions.forest import Describe, EncodedIds, KnownTurn, TurnForest, encoded, ids_as_text
from proxy.sessions.identities import check_id, end_user, next_id, next_prefix
from proxy.sessions.memory import TRUNCATION, Enter, LiveSession, SessionCache, known_turn
from proxy.sessions.rendering import UNCOUNTED_BYTES, RenderThreads, check_fits
from proxy.sessions.template import ChatTemplate, Continued, Unsafe, restored
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from proxy.writer.process import NewTurn
from turnwise.errors import Conflict
from turnwise.sampling import NUMBERS, with_numbers
from turnwise.store import conversations
from turnwise.store.database import Database
from turnwise.types import Session, SessionStatus, Split, TokenIds

RENDERED_HERE = 4 * 2**10
"""Bytes of messages that are rendered and tokenised on the event loop; more are left to a thread. 20,000 take 8 ms."""
NO_IDS = np.empty(0, np.int32)


@dataclasses.dataclass(slots=True, eq=False)
class CallPlace:
    """The session of a call, how it was found, and the turn and the prompt with which the call continues it."""

    live: LiveSession
    session: Session
    """The session as the call's policy sees it: if that is not its own, with that policy and without an arm."""
    forest: TurnForest
    """The turns of the call's policy."""
    conversation: ConversationDigests
    inferred_by: str | None = None
    """The API key whose conversations identified the session; None if the call names its session."""
    repeated_by: tuple[Caller, bytes] | None = None
    """What a repetition of a request that names no session has in common with it; None for others."""
    reserved: KnownTurn | None = None
    """The turn that the call goes on from, also where it starts a new chain, while it is reserved for the call."""
    parent: KnownTurn | None = None
    """The turn that the call extends; None starts a new chain."""
    prompt: EncodedIds | None = None
    """The prompt to send, which extends the parent's ids; None, without a parent, lets the engine render it."""
    between: TokenIds = dataclasses.field(default_factory=NO_IDS.copy)
    """The prompt's ids after the parent's; they belong to this turn."""
    reason: str | None = None
    """Why a conversation with replies starts a new chain, or branches from an earlier turn than its last reply's."""

    def start_chain(self, reason: str) -> None:
        """Let the call extend no turn, because the engine does not take the prompt that extends it."""
        self.parent, self.prompt, self.between, self.reason = None, None, NO_IDS, reason


Caller: TypeAlias = tuple[str, str, int]
"""Whose conversations a call may continue: a tenant, an API key, and the policy that sampled in them."""


class Unnamed:
    """The sessions of calls that name none: each has its own, unless a feature finds one."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions

    async def place(self, call: Call, principal: Principal, caller: Caller, request: bytes) -> CallPlace:  # noqa: ARG002
        """Return the place of a call; `request` is the digest of its request."""
        live = await self.sessions.cache.open(opened_by_call(f"auto-{uuid.uuid4().hex}", caller, call))
        return await self.sessions.place_in(live, call, principal)

    async def find(self, call: Call, principal: Principal, caller: Caller) -> LiveSession | None:  # noqa: ARG002
        """Return the stored session that a call continues."""
        return None

    def failed(self, place: CallPlace, caller: Caller, request: bytes) -> None:
        """Take a call that has failed, and what a repetition of its request has in common with it."""

    def remember(self, key_id: str, live: LiveSession, turns: Iterable[KnownTurn]) -> None:
        """Take the committed turns of a call of an API key."""

    def clear(self) -> None:
        """Forget all, because the digests of conversations change."""


class Sessions:
    """Finds the sessions of calls, and plans the calls in them."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        settings: ProxySettings,
        metrics: Metrics,
        faults: FaultPoints | None = None,
        context_tokens: Callable[[], float] = lambda: math.inf,
        *,
        is_shared: bool = False,
        unnamed: type[Unnamed] | None = None,
        opened: Sequence[Callable[[Session], Session]] = (),
        entering: Sequence[Callable[[Session], Enter | None]] = (),
        describe: Describe | None = None,
    ) -> None:
        self.template: ChatTemplate | None = None
        """The served model's chat template; None until an engine has reported its model."""
        self.cache = SessionCache(
            database, writer, settings, metrics, faults or FaultPoints(), opened, entering, describe
        )
        self.database = database
        self.writer = writer
        self._settings = settings
        self.metrics = metrics
        self._context_tokens = context_tokens
        self._threads = RenderThreads()
        self.reserved: collections.Counter[str] = collections.Counter()
        """Ids of the turns that running calls extend."""
        self.is_shared = is_shared
        """Whether calls of a session may reach other processes in its course."""
        self.unnamed = (unnamed or Unnamed)(self)
        self.conversations = Conversations(settings.cache_share("messages"))
        self.learn_template(None)

    async def find(self, call: Call, principal: Principal, request: bytes = b"") -> CallPlace:
        """Return the session of a call, whose parameters replace the call's; create the session if it does not exist.

        Args:
            call: the call.
            principal: its caller.
            request: the digest of its request.

        Raises:
            Conflict: the session is over, and it was named by a path or a key, or created by `POST /v1/sessions`.
            InvalidRequest: the session id is not valid.
            Unauthorized: the session of a session key was deleted.
        """
        session_id, caller = call.session_id, (principal.tenant, principal.key_id, call.policy_id)
        if session_id is None:
            return await self.unnamed.place(call, principal, caller, request)
        if principal.session_id is not None:
            live = await self.cache.find_own(principal)
        else:
            live = self.cache.find((principal.tenant, session_id)) or await self.cache.open(
                opened_by_call(check_id(session_id), caller, call)
            )
        if live.session.status is not SessionStatus.OPEN:
            is_named_by_app = principal.session_id is None and call.session_source != "path"
            if not is_named_by_app or live.session.opened_by != "call":
                raise Conflict(
                    f"session {session_id!r} is {live.session.status.value}; create a new one to go on",
                    code="session_not_open",
                )
            live = await self._open_next(live, call, principal.root_key_id)
        return await self.place_in(live, call, principal)

    async def place_in(
        self,
        live: LiveSession,
        call: Call,
        principal: Principal,
        inferred_by: str | None = None,
        searched: ConversationDigests | None = None,
    ) -> CallPlace:
        """Place a call in a session.

        Features may replace parameters before its conversation is read, because the template prints some of them;
        what `searched` has is read again only where that depends on the session.
        """
        session = live.session
        # Where the caller has named the session, it is the session's own policy that samples what names none.
        if (call.names_policy or inferred_by is not None) and call.policy_id != session.policy_id:
            session = dataclasses.replace(session, policy_id=call.policy_id, arm=None)  # an arm is of the own policy
        if any(type(call.body[name]) is str for name in NUMBERS.keys() & call.body.keys()):
            call.body = with_numbers(call.body)
        asked = call.body
        for enter in live.entered:
            enter(call, session, principal.root_key_id)
        if searched is None or (
            call.body is not asked and searched.context != context_digest(call.tools, template_arguments(call.body))
        ):
            searched = await self.conversations.read(call, principal, self.cache.fields_read)
        return CallPlace(live, session, live.forests[session.policy_id], searched, inferred_by)

    async def _open_next(self, over: LiveSession, call: Call, key_id: str) -> LiveSession:
        """Return the open session that continues one which is over; create it if there is none.

        An application keeps the id that it has chosen, for example after an hour of silence.
        """
        tenant, name = over.key
        newest = over.newest_number
        if newest is None:
            newest = await self.database.fetch(conversations.newest_generation, tenant, next_prefix(name))
        for number in itertools.count(max(newest, 2)):
            wanted = opened_by_call(next_id(name, number), (tenant, key_id, over.session.policy_id), call)
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
        self.unnamed.clear()
        self.conversations.clear()

    async def plan(self, place: CallPlace, call: Call) -> None:
        """Decide which turn the call extends and with which prompt; reserve that turn until `release`.

        Raises:
            PromptTooLong: the messages after the turn cannot fit into the context.
        """
        live, conversation, forest = place.live, place.conversation, place.forest
        if not conversation.num_replied:
            if self.is_shared and forest.by_id:
                await self.cache.refresh(live)  # what a new chain is may depend on the session's others
            place.reason = forest.break_reason(conversation)
        elif not self._settings.continuation:
            place.reason = "continuation_off"
        else:
            if place.reserved is None:
                parent = forest.deepest(conversation, call.messages)
                # Another proxy may have stored a longer history, or the whole reply to a retry of a call cut off here.
                if parent is None or parent.num_messages < conversation.num_replied or parent.is_aborted:
                    await self.cache.refresh(live)
                    parent = forest.deepest(conversation, call.messages)
                if parent is not None:
                    place.reserved = parent
                    self.reserved[parent.turn_id] += 1
            place.reason = await self._extend(place, call)
        if len(live.forests) > 1 and place.reason in (None, "edited_history") and _goes_on_from_another_policy(place):
            place.reason = "policy_changed"

    async def _extend(self, place: CallPlace, call: Call) -> str | None:
        """Let a call extend the turn that is reserved for it; return why it extends none, or an earlier one.

        Raises:
            PromptTooLong: the messages after the turn cannot fit into the context.
        """
        parent, template, conversation, body = place.reserved, self.template, place.conversation, call.body
        if parent is None:
            return place.forest.break_reason(conversation)
        if (tokens := parent.tokens or await self.cache.read_tokens(place.live, parent)) is None:
            return "tokens_not_stored"
        if template is None:
            return "template_unknown"
        path = [*place.forest.ancestors(parent)]
        reason: str | None = None if call.media is None else call.media.why_not_extended(call, path)
        if reason is not None:
            return reason
        # With these fields the prompt ends inside the last message, which the client wrote.
        if body.get("continue_final_message") or body.get("echo") or body.get("add_generation_prompt") is False:
            return "prefill"
        if parent.is_truncated or body.get(TRUNCATION) is not None:
            return "truncated_prompt"
        if conversation.num_bytes > UNCOUNTED_BYTES:
            new, limit = call.messages[parent.num_messages :], self._context_tokens()
            await check_fits(new, tokens.num_ids, limit, lambda: template.longest_tokens)
        continued = Continued(
            messages=call.messages,
            replied=parent.num_messages - 1,
            last_token=tokens.last_id,
            reasoning=parent.reasoning,
            tools=call.tools,
            arguments=template_arguments(body),
            keep_thinking=self._settings.thinking == "keep",
        )
        try:
            place.between = await self._render(place, continued, template, path)
        except Unsafe as unsafe:
            return unsafe.reason
        place.parent, place.prompt = parent, tokens
        if len(place.between):
            place.prompt = encoded(ids_as_text(place.between), tokens.num_ids + len(place.between), tokens)
        return place.forest.break_reason(conversation, parent)

    async def _render(
        self, place: CallPlace, continued: Continued, template: ChatTemplate, path: Sequence[KnownTurn]
    ) -> TokenIds:
        """Return the ids after a turn's, in a thread where there is much to render; complete the messages' kinds.

        Raises:
            Unsafe: the template does not continue the turn's text.
        """
        conversation = place.conversation
        # Thinking is put back into the replies, which clients send without it.
        thinking = {turn.num_messages - 1: turn.reasoning for turn in path if turn.reasoning}
        # A copy: another call that begins with the same messages may complete the list at the same time.
        kinds = conversation.kinds[:]
        short, is_long = template.short, conversation.num_bytes > RENDERED_HERE
        if short is not None:
            is_long = is_long and short.num_rendered(continued, conversation) > RENDERED_HERE
            render = functools.partial(short.next_ids, continued, kinds, thinking)
        else:
            whole = continued._replace(messages=restored(continued.messages, thinking)) if thinking else continued
            render = functools.partial(template.next_ids, whole)
        if is_long or not template.is_local:
            between = await self._threads.run(place.session.tenant, render)
        else:
            between = render()
        conversation.kinds = kinds
        return between

    def release(self, place: CallPlace, *, has_failed: bool = False) -> None:
        """Release the turn that a call has reserved, after the call has ended; keep the session of one that failed."""
        if has_failed and place.repeated_by is not None:
            self.unnamed.failed(place, *place.repeated_by)
        if place.reserved is not None:
            turn_id, place.reserved = place.reserved.turn_id, None
            self.reserved[turn_id] -= 1
            if not self.reserved[turn_id]:
                del self.reserved[turn_id]

    def remember(self, place: CallPlace, turns: Iterable[NewTurn]) -> list[KnownTurn]:
        """Add the committed turns of a call, so that the next call can extend them; return them as they are kept."""
        sent, before, known = place.prompt, place.conversation.messages, []
        for turn in turns:
            if not len(turn.token_ids):
                continue
            parent = None if turn.parent_turn_id is None else place.parent
            ids, ids_before = ids_as_text(turn.token_ids), None
            if parent is not None and sent is not None:  # the ids after the parent's are one piece
                ids_before = sent if not len(turn.prompt_delta) else sent.before
                ids = ids if not len(turn.prompt_delta) else sent.piece + b"," + ids
            elif turn.encoded_prompt:  # a piece of its own, because a long one would be copied
                ids_before = encoded(turn.encoded_prompt, turn.prompt_length)
            tokens = encoded(ids, turn.prompt_length + len(turn.token_ids), ids_before)
            known.append(known_turn(turn, parent, before[-1] if before else b"", self.cache.describe, tokens=tokens))
        self.cache.add_turns(place.live, known)
        if place.reserved is not None and any(not turn.is_aborted for turn in known):
            place.reserved.has_child = True
        if place.inferred_by is not None:
            self.unnamed.remember(place.inferred_by, place.live, known)
        return known


def opened_by_call(session_id: str, caller: Caller, call: Call) -> Session:
    """Return a new session that nobody has created explicitly; one of a version that its call names is not trained."""
    tenant, key_id, policy_id = caller
    return Session(
        session_id=session_id,
        tenant=tenant,
        policy_id=policy_id,
        split=Split.TRAIN if call.policy_version is None else Split.EVAL,
        user_id=end_user(call),
        key_id=key_id,
        train=call.train,
        record=call.record,
        opened_by="call",
        agent=call.agent,
    )


def _goes_on_from_another_policy(place: CallPlace) -> bool:
    """Return whether another policy's turns have replies of the conversation that the call's own turns have not."""
    first, conversation = 0 if place.parent is None else place.parent.num_messages, place.conversation
    digests = {conversation.dialogue[index] for index in conversation.replies if index >= first}
    others = (each for each in place.live.forests.values() if each is not place.forest)
    return any(not digests.isdisjoint(each.by_dialogue) for each in others)
