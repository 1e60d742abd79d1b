"""Which turn a request extends, and the exact prompt ids for it.

A session is a forest. A request extends the deepest turn whose messages and reply it repeats; its prompt is that
turn's stored tokens followed by what the template puts after the reply. What repeats nothing opens a chain of its
own, and a conversation that should have been an extension but is none says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from proxy.continuation.chat_template import ChatTemplate, Reply, Unsafe
from proxy.continuation.digests import History, context_digest, digest_history, has_media
from proxy.dialects.base import Call
from turnwise.types import Json, TokenIds


@dataclasses.dataclass(slots=True, kw_only=True)
class KnownTurn:
    """What must be remembered of a turn to extend it."""

    turn_id: str
    parent_turn_id: str | None
    chain_id: str
    num_messages: int
    """Messages of its prompt and its reply."""
    history_digest: bytes
    messages_digest: bytes
    dialogue_digest: bytes
    reasoning: str = ""
    """The thinking that was sampled."""
    has_child: bool = False
    tokens: bytes | None = None
    """Prompt and sampled ids as int32 bytes; None once they are better read back from the store."""


@dataclasses.dataclass(slots=True)
class Forest:
    """The turns of one session, by what a request must repeat to extend them."""

    by_id: dict[str, KnownTurn] = dataclasses.field(default_factory=dict)
    by_history: dict[bytes, KnownTurn] = dataclasses.field(default_factory=dict)

    def add(self, turn: KnownTurn) -> None:
        """Remember a turn; a later one with the same history takes its place as the one to extend."""
        self.by_id[turn.turn_id] = turn
        self.by_history[turn.history_digest] = turn
        parent = self.by_id.get(turn.parent_turn_id or "")
        if parent is not None:
            parent.has_child = True
            parent.tokens = None

    def deepest(self, history: History, before: int) -> KnownTurn | None:
        """Return the turn that covers most of the first `before` messages."""
        for end in range(before - 1, -1, -1):
            turn = self.by_history.get(history.full[end])
            if turn is not None:
                return turn
        return None

    def ancestors(self, turn: KnownTurn) -> Iterable[KnownTurn]:
        """Yield the turn itself and what it extends, newest first."""
        at: KnownTurn | None = turn
        while at is not None:
            yield at
            at = self.by_id.get(at.parent_turn_id or "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a call becomes a prompt."""

    history: History
    context: bytes
    parent: KnownTurn | None = None
    prompt_token_ids: TokenIds | None = None
    """What the engine must sample after; None lets it render the messages."""
    parent_length: int = 0
    """Tokens of the parent, prompt and sampled; the rest of the prompt is this turn's own."""
    reason: str | None = None
    """Why a conversation with a history opens a new chain."""

    def new_messages(self, messages: list[Json]) -> list[Json]:
        """Return the messages that this turn must store."""
        return messages if self.parent is None else messages[self.parent.num_messages :]


def plan_call(
    call: Call,
    history: History,
    context: bytes,
    forest: Forest,
    template: ChatTemplate | None,
    tokens_of: TokenIds | None,
    parent: KnownTurn | None,
    *,
    keep_thinking: bool,
) -> Plan:
    """Plan a call that may extend `parent`, whose prompt and sampled ids are `tokens_of`."""
    if parent is None or tokens_of is None:
        return Plan(history=history, context=context, reason=break_reason(call, history, forest))
    reason = _never_extended(call, template)
    if reason is not None or template is None:
        return Plan(history=history, context=context, reason=reason)
    try:
        between = template.continuation(
            with_thinking(call.messages, forest, parent),
            parent.num_messages - 1,
            Reply(
                last_token=int(tokens_of[-1]),
                ended=int(tokens_of[-1]) in template.end_tokens,
                reasoning=parent.reasoning,
            ),
            call.tools,
            call.template_arguments,
            keep_thinking=keep_thinking,
        )
    except Unsafe as unsafe:
        return Plan(history=history, context=context, reason=unsafe.reason)
    return Plan(
        history=history,
        context=context,
        parent=parent,
        prompt_token_ids=np.concatenate([tokens_of, between]),
        parent_length=len(tokens_of),
    )


def digest_call(call: Call) -> tuple[History, bytes]:
    """Digest every prefix of the call's messages."""
    context = context_digest(call.tools, call.template_arguments)
    return digest_history(call.messages, context), context


def reply_position(messages: Sequence[Json]) -> int:
    """Return how many messages come up to and including the last reply; 0 where there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].get("role") == "assistant":
            return index + 1
    return 0


def _never_extended(call: Call, template: ChatTemplate | None) -> str | None:
    """Return why this call cannot be extended whatever it repeats."""
    if template is None:
        return "template_unknown"
    if has_media(call.messages):
        return "media"
    if call.continues_final_message:
        return "prefill"
    if call.body.get("truncate_prompt_tokens") is not None:
        return "truncated_prompt"
    return None


def break_reason(call: Call, history: History, forest: Forest) -> str | None:
    """Return why a conversation that carries a reply extends nothing; None when nothing could have been expected."""
    replies = reply_position(call.messages)
    if replies == 0 or not forest.by_id:
        return None
    turns = forest.by_id.values()
    messages_digests = {turn.messages_digest for turn in turns}
    if any(digest in messages_digests for digest in history.messages[:replies]):
        return "tools_changed"
    dialogue_digests = {turn.dialogue_digest for turn in turns}
    if any(
        digest in dialogue_digests
        for message, digest in zip(call.messages[:replies], history.dialogue, strict=False)
        if message.get("role") == "assistant"
    ):
        return "system_changed"
    return "edited_history"


def with_thinking(messages: list[Json], forest: Forest, parent: KnownTurn) -> list[Json]:
    """Put the sampled thinking back into the replies that the client repeated without it."""
    restored: list[Json] | None = None
    for turn in forest.ancestors(parent):
        if turn.reasoning:
            restored = restored if restored is not None else list(messages)
            restored[turn.num_messages - 1] = {**restored[turn.num_messages - 1], "reasoning": turn.reasoning}
    return messages if restored is None else restored
