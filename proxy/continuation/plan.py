"""Which turn a request extends, and the exact prompt ids for it.

A session is a forest. A request extends the deepest turn whose messages and reply it repeats; its prompt is that
turn's stored tokens followed by what the template renders after the reply. A call that extends no stored turn starts
a new chain. If its conversation contains replies, the plan names the reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from proxy.continuation.chat_template import ChatTemplate, Unsafe
from proxy.continuation.conversation import Conversation, call_has_media
from proxy.continuation.digests import History
from proxy.continuation.encoded_ids import EncodedIds
from proxy.continuation.reply import Reply
from proxy.dialects.base import Call
from turnwise.types import Json, Role, TokenIds

RENDERED_HERE = 4 * 2**10
"""Characters that are rendered and tokenised on the event loop; more are left to a thread. 20,000 take 8 ms."""
RENDERING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="render")
"""Threads of their own: a text of many megabytes takes seconds, and other calls read the store in the common ones."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class KnownTurn:
    """The part of a stored turn that is needed to extend it."""

    turn_id: str
    parent_turn_id: str | None
    chain_id: str
    num_messages: int
    """Number of messages in its prompt, plus 1 for its reply."""
    history_digest: bytes
    messages_digest: bytes
    dialogue_digest: bytes
    prompt_digest: bytes = b""
    """Digest of the prompt's messages alone."""
    messages_state: Any = None
    """The running hash of `messages_digest`; None once another turn extends this one."""
    reasoning: str = ""
    """The thinking that was sampled."""
    call_ids: frozenset[str] = frozenset()
    """Ids of the tool calls in its reply."""
    is_aborted: bool = False
    """Whether its reply was cut off."""
    role: Role = Role.MAIN
    side_task: str | None = None
    """At the root of a chain: what it asks for, if that is not an agent's own work."""
    system_digest: bytes = b""
    """At the root of a chain: the digest of its system messages."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """When its call started and ended; seconds since 1970."""
    has_child: bool = False
    """Whether a turn whose reply was not cut off extends it."""
    tokens: EncodedIds | None = None
    """Prompt and sampled ids; None when they must be read from the store."""


@dataclasses.dataclass(slots=True)
class Forest:
    """The turns of one session, indexed by id and by conversation digest."""

    by_id: dict[str, KnownTurn] = dataclasses.field(default_factory=dict)
    by_history: dict[bytes, list[KnownTurn]] = dataclasses.field(default_factory=dict)
    """Several turns have the same history where parallel agents got the same reply."""
    by_dialogue: dict[bytes, list[KnownTurn]] = dataclasses.field(default_factory=dict)
    """The same without system messages, tools and template arguments."""
    by_prompt: dict[tuple[str | None, bytes, bool], list[KnownTurn]] = dataclasses.field(default_factory=dict)
    """Indexed by the turn that they extend (None for roots), their prompt's digest, and whether they are aborted."""
    agent_roots: dict[bytes, KnownTurn] = dataclasses.field(default_factory=dict)
    """The first root under each system message, of those that ask for an agent's own work."""
    side_roots: list[KnownTurn] = dataclasses.field(default_factory=list)
    """The other roots: each asks for what its `side_task` names."""

    def add(self, turn: KnownTurn) -> None:
        """Add a turn; one that is added again, with its tokens, replaces itself."""
        earlier = self.by_id.get(turn.turn_id)
        if earlier is not None:
            turn.has_child = earlier.has_child
            self.by_history[turn.history_digest].remove(earlier)
            self.by_dialogue[turn.dialogue_digest].remove(earlier)
            self.by_prompt[_prompt_key(earlier)].remove(earlier)
            self._remove_root(earlier)
        self.by_id[turn.turn_id] = turn
        self.by_history.setdefault(turn.history_digest, []).append(turn)
        self.by_dialogue.setdefault(turn.dialogue_digest, []).append(turn)
        self.by_prompt.setdefault(_prompt_key(turn), []).append(turn)
        if turn.parent_turn_id is None:
            self._add_root(turn)
        parent = self.by_id.get(turn.parent_turn_id or "")
        if parent is not None:
            parent.has_child = parent.has_child or not turn.is_aborted
            if parent.has_child:
                parent.messages_state = None

    def _add_root(self, turn: KnownTurn) -> None:
        if turn.side_task is None:
            self.agent_roots.setdefault(turn.system_digest, turn)
        else:
            self.side_roots.append(turn)

    def _remove_root(self, turn: KnownTurn) -> None:
        if self.agent_roots.get(turn.system_digest) is turn:
            del self.agent_roots[turn.system_digest]
        elif turn in self.side_roots:
            self.side_roots.remove(turn)

    def siblings(self, turn: KnownTurn, *, aborted: bool) -> list[KnownTurn]:
        """Return the other turns, aborted or not, that were sampled after the same prompt."""
        same = self.by_prompt.get((turn.parent_turn_id, turn.prompt_digest, aborted), ())
        return [other for other in same if other is not turn]

    def deepest(self, conversation: Conversation) -> KnownTurn | None:
        """Return the turn that covers most of the conversation's messages up to the last reply.

        Of several turns with that history, prefer those whose tool-call ids the conversation repeats, then complete
        replies to those that were cut off, then the newest: a client that repeats a call has seen the last reply.
        """
        for end in range(conversation.num_replied - 1, -1, -1):
            turns = self.by_history.get(conversation.history.full[end])
            if turns:
                return self._choose(turns, conversation)
        return None

    def _choose(self, turns: list[KnownTurn], conversation: Conversation) -> KnownTurn:
        if len(turns) == 1:
            return turns[0]
        call_ids = conversation.call_ids()
        same_run = [turn for turn in turns if self.call_ids(turn) & call_ids] or turns
        return ([turn for turn in same_run if not turn.is_aborted] or same_run)[-1]

    def call_ids(self, turn: KnownTurn) -> frozenset[str]:
        """Return the ids of the tool calls of a turn and its ancestors."""
        return frozenset().union(*(each.call_ids for each in self.ancestors(turn)))

    def ancestors(self, turn: KnownTurn) -> Iterable[KnownTurn]:
        """Yield the turn itself, then its ancestors, newest first."""
        current: KnownTurn | None = turn
        while current is not None:
            yield current
            current = self.by_id.get(current.parent_turn_id or "")


def _prompt_key(turn: KnownTurn) -> tuple[str | None, bytes, bool]:
    return turn.parent_turn_id, turn.prompt_digest, turn.is_aborted


def is_free(turn: KnownTurn, reserved: Container[str]) -> bool:
    """Return whether no stored turn and no running call extends the turn."""
    return not turn.has_child and turn.turn_id not in reserved


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The prompt of one call."""

    history: History
    parent: KnownTurn | None = None
    """The turn that the call extends; None starts a new chain."""
    prompt: EncodedIds | None = None
    """The prompt to send; None lets the engine render the messages."""
    parent_tokens: EncodedIds | None = None
    """The parent's prompt and sampled ids, which the prompt begins with."""
    between: TokenIds = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))
    """The prompt's ids after the parent's; they belong to this turn."""
    reason: str | None = None
    """Why a conversation with replies starts a new chain, or branches from an earlier turn than its last reply's."""
    is_retokenised: bool = False
    """Whether the conversation contains replies and no stored tokens are used for them."""

    def new_messages(self, messages: list[Json]) -> list[Json]:
        """Return the messages that this turn must store."""
        return messages if self.parent is None else messages[self.parent.num_messages :]


async def plan_call(
    call: Call,
    conversation: Conversation,
    forest: Forest,
    template: ChatTemplate | None,
    parent: KnownTurn | None,
    parent_tokens: EncodedIds | None,
    *,
    keep_thinking: bool,
) -> Plan:
    """Plan a call that may extend `parent`, whose prompt and sampled ids are `parent_tokens`."""
    history = conversation.history
    if parent is None or parent_tokens is None:
        return new_chain(conversation, break_reason(conversation, forest))
    reason = _reason_not_to_extend(call, template)
    if reason is not None or template is None:
        return new_chain(conversation, reason)
    try:
        between, prompt = await _extended_prompt(
            call, forest, template, parent, parent_tokens, keep_thinking=keep_thinking
        )
    except Unsafe as unsafe:
        return new_chain(conversation, unsafe.reason)
    return Plan(
        history=history,
        parent=parent,
        prompt=prompt,
        parent_tokens=parent_tokens,
        between=between,
        reason=break_reason(conversation, forest, parent),
    )


async def _extended_prompt(
    call: Call,
    forest: Forest,
    template: ChatTemplate,
    parent: KnownTurn,
    parent_tokens: EncodedIds,
    *,
    keep_thinking: bool,
) -> tuple[TokenIds, EncodedIds]:
    """Return the ids after the parent's, and the whole prompt; a long text is rendered and tokenised in a thread.

    Raises:
        Unsafe: the template cannot continue the parent.
    """
    messages, replied = with_thinking(call.messages, forest, parent), parent.num_messages - 1
    # A copy: another call that begins with the same messages may complete the list at the same time.
    outlines = [] if call.known is None else call.known.outlines[:]
    last_token = parent_tokens.last_id
    reply = Reply(last_token=last_token, ended=last_token in template.end_tokens, reasoning=parent.reasoning)

    def extend() -> tuple[TokenIds, EncodedIds]:
        between = template.continuation(
            messages,
            replied,
            reply,
            call.tools,
            call.template_arguments,
            keep_thinking=keep_thinking,
            outlines=outlines,
        )
        return between, parent_tokens.extended(between)

    num_outlined = min(len(outlines), replied) if template.shortens else 0
    is_long = has_more_text(messages[num_outlined:], RENDERED_HERE)
    extended = await asyncio.get_running_loop().run_in_executor(RENDERING, extend) if is_long else extend()
    if call.known is not None:
        call.known.outlines = outlines
    return extended


def has_more_text(messages: Sequence[Json], limit: int) -> bool:
    """Return whether the content and the tool calls of messages have more characters than `limit`."""
    total = 0
    for message in messages:
        total += _text_length(message.get("content")) + _text_length(message.get("tool_calls"))
        if total > limit:
            return True
    return False


def _text_length(value: Any) -> int:
    """Return the characters of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_length, value.values()))
    return sum(map(_text_length, value)) if isinstance(value, list) else 0


def new_chain(conversation: Conversation, reason: str | None) -> Plan:
    """Return the plan of a call that extends no turn."""
    is_retokenised = reason is not None and conversation.num_replied > 0
    return Plan(history=conversation.history, reason=reason, is_retokenised=is_retokenised)


def _reason_not_to_extend(call: Call, template: ChatTemplate | None) -> str | None:
    """Return why this call cannot extend any turn, whatever its messages are; None if it can."""
    if template is None:
        return "template_unknown"
    if call_has_media(call):
        return "media"
    if call.continues_final_message:
        return "prefill"
    if call.body.get("truncate_prompt_tokens") is not None:
        return "truncated_prompt"
    return None


def break_reason(conversation: Conversation, forest: Forest, parent: KnownTurn | None = None) -> str | None:
    """Return why a conversation extends no turn, or an earlier turn than its last reply's; None if it breaks nothing.

    Args:
        conversation: what the call sends.
        forest: the turns of its session.
        parent: the turn that it extends; None without one.
    """
    num_replied, history = conversation.num_replied, conversation.history
    first = 0 if parent is None else parent.num_messages
    if not forest.by_id or num_replied <= first:
        return "edited_history" if _drops_reply(conversation, forest, parent) else None
    turns = forest.by_id.values()
    messages_digests = {turn.messages_digest for turn in turns}
    if any(digest in messages_digests for digest in history.messages[first:num_replied]):
        return "tools_changed"
    dialogue_digests = {turn.dialogue_digest for turn in turns}
    if any(
        history.dialogue[index] in dialogue_digests
        for index in range(first, num_replied)
        if conversation.messages[index].get("role") == "assistant"
    ):
        return "system_changed"
    return "edited_history"


def _drops_reply(conversation: Conversation, forest: Forest, parent: KnownTurn | None) -> bool:
    """Return whether the conversation repeats the prompt of a turn after `parent`, and then leaves its reply out."""
    parent_id, first = (None, 0) if parent is None else (parent.turn_id, parent.num_messages)
    continued = conversation.history.messages[first:-1]
    return any(forest.by_prompt.get((parent_id, digest, False)) for digest in continued)


def with_thinking(messages: list[Json], forest: Forest, parent: KnownTurn) -> list[Json]:
    """Return the messages with the sampled thinking in every reply that the client sent without it."""
    restored: list[Json] | None = None
    for turn in forest.ancestors(parent):
        if turn.reasoning:
            restored = restored if restored is not None else list(messages)
            restored[turn.num_messages - 1] = {**restored[turn.num_messages - 1], "reasoning": turn.reasoning}
    return messages if restored is None else restored
