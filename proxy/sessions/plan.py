"""Which turn a request extends, and the exact prompt ids for it.

A request extends the deepest turn whose messages and reply it repeats; its prompt is that turn's stored tokens followed
by what the template renders after the reply. A call that extends no stored turn starts a new chain. If its conversation
contains replies, the plan names the reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from proxy.dialects.base import Call, template_arguments
from proxy.sessions.conversation import Conversation
from proxy.sessions.digests import has_media
from proxy.sessions.encoded_ids import EncodedIds, encode_ids
from proxy.sessions.forest import TRUNCATION, Forest, KnownTurn
from proxy.sessions.outline import Continued
from proxy.sessions.template import ChatTemplate, Unsafe
from turnwise.types import TokenIds

RENDERED_HERE = 4 * 2**10
"""Bytes of messages that are rendered and tokenised on the event loop; more are left to a thread. 20,000 take 8 ms."""
NO_IDS = np.empty(0, np.int32)
RENDERING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="render")
"""Threads for rendering only: a text of many megabytes takes seconds, and other calls read the store in others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The prompt of one call; without any field that of a call which nothing is known of."""

    parent: KnownTurn | None = None
    """The turn that the call extends; None starts a new chain."""
    prompt: EncodedIds | None = None
    """The prompt to send; None lets the engine render the messages."""
    parent_tokens: EncodedIds | None = None
    """The parent's prompt and sampled ids, which the prompt begins with."""
    between: TokenIds = dataclasses.field(default_factory=lambda: NO_IDS)
    """The prompt's ids after the parent's; they belong to this turn."""
    reason: str | None = None
    """Why a conversation with replies starts a new chain, or branches from an earlier turn than its last reply's."""
    is_retokenised: bool = False
    """Whether the conversation contains replies and no stored tokens are used for them."""


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
    if parent is None or parent_tokens is None:
        return new_chain(conversation, break_reason(conversation, forest))
    reason = _reason_not_to_extend(call, parent, template)
    if reason is not None or template is None:
        return new_chain(conversation, reason)
    thinking = sampled_thinking(forest, parent)
    continued = Continued(
        messages=call.messages,
        replied=parent.num_messages - 1,
        last_token=parent_tokens.last_id,
        reasoning=parent.reasoning,
        tools=call.tools,
        arguments=template_arguments(call.body),
        keep_thinking=keep_thinking,
    )
    # A copy: another call that begins with the same messages may complete the list at the same time.
    kinds = conversation.prefix.kinds[:]

    def extend() -> tuple[TokenIds, EncodedIds]:
        between = template.continuation(continued, kinds, thinking)
        return between, encode_ids(between, parent_tokens) if len(between) else parent_tokens

    is_outlined = (
        bool(kinds) and continued.replied >= len(kinds) and template.renders_in_short(call.messages, continued.replied)
    )
    num_rendered = conversation.prefix.num_bytes - (conversation.prefix.num_old_bytes if is_outlined else 0)
    try:
        if num_rendered > RENDERED_HERE:
            between, prompt = await asyncio.get_running_loop().run_in_executor(RENDERING, extend)
        else:
            between, prompt = extend()
    except Unsafe as unsafe:
        return new_chain(conversation, unsafe.reason)
    conversation.prefix.kinds = kinds
    return Plan(
        parent=parent,
        prompt=prompt,
        parent_tokens=parent_tokens,
        between=between,
        reason=break_reason(conversation, forest, parent),
    )


def new_chain(conversation: Conversation, reason: str | None) -> Plan:
    return Plan(reason=reason, is_retokenised=reason is not None and conversation.num_replied > 0)


def _reason_not_to_extend(call: Call, parent: KnownTurn, template: ChatTemplate | None) -> str | None:
    """Return why this call cannot extend the turn, whatever its messages are; None if it can."""
    if template is None:
        return "template_unknown"
    if has_media(call.messages):
        return "media"
    body = call.body
    # With these fields the prompt ends inside the last message, which the client wrote.
    if body.get("continue_final_message") or body.get("echo") or body.get("add_generation_prompt") is False:
        return "prefill"
    if parent.is_truncated or body.get(TRUNCATION) is not None:
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
        left_out = [turn for turn in forest.left_out(parent, history) if turn.prompt_digest != history.messages[-1]]
        return None if all(turn.is_aborted for turn in left_out) else "edited_history"
    messages_digests = {turn.messages_digest for turn in forest.by_id.values()}
    if not messages_digests.isdisjoint(history.messages[first:num_replied]):
        return "tools_changed"
    if any(history.dialogue[index] in forest.by_dialogue for index in history.replies if first <= index < num_replied):
        return "system_changed"
    return "edited_history"


def sampled_thinking(forest: Forest, parent: KnownTurn) -> dict[int, str]:
    """Return the thinking that was sampled in the replies up to `parent`, by the position of the reply.

    It is put back into the replies, which clients send without it.
    """
    return {turn.num_messages - 1: turn.reasoning for turn in forest.ancestors(parent) if turn.reasoning}
