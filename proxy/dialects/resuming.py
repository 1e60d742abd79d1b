"""Going on from a stored turn that the client names instead of repeating: a previous response, a message thread."""

from __future__ import annotations

from proxy.dialects.base import Call
from turnwise.store.lineage import TurnView


def resume(call: Call, earlier: TurnView) -> None:
    """Put the conversation up to and including a stored turn in front of the call's own messages.

    A response's instructions hold for it alone: the earlier ones go, the call's own take their place. What a thread of
    messages was created with, system prompt and tools, holds for all of it.
    """
    own, before = call.messages, earlier.messages
    if earlier.turn.sampling.get("instructions"):
        before = before[1:]
    num_instructions = 1 if call.notes.get("instructions") else 0
    call.messages = [*own[:num_instructions], *before, earlier.turn.response, *own[num_instructions:]]
    call.body["messages"] = call.messages
    if call.dialect.name == "messages" and earlier.tools and not call.tools:
        call.body["tools"] = earlier.tools
