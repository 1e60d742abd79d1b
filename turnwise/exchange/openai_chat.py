"""OpenAI's fine-tuning format: one line per conversation, with the tools that its model saw.

Replies that are no training data have weight 0: assistant messages that an application wrote into a prompt, and turns
that are not trainable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise.chains import IMPORTED, TRAINABLE_OUTCOMES
from turnwise.client.conversations import conversations
from turnwise.types import Json

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")
"""Fields of a message that the format has; sampled reasoning has no place in it."""


def lines(session: Json) -> Iterator[Json]:
    """Yield a training example per conversation of the session."""
    for conversation in conversations(session):
        trained = {place for place, turn in conversation.replies.items() if _is_trained(turn)}
        messages = [_message(one, is_trained=place in trained) for place, one in enumerate(conversation.messages)]
        example: dict[str, Any] = {"messages": messages}
        if conversation.tools:
            example["tools"] = conversation.tools
        yield example


def _message(message: Json, *, is_trained: bool) -> Json:
    kept = {field: message[field] for field in MESSAGE_FIELDS if message.get(field) is not None}
    return kept if is_trained or message.get("role") != "assistant" else kept | {"weight": 0}


def _is_trained(turn: Json) -> bool:
    return bool(turn["token_ids"]) and (turn["outcome"] in TRAINABLE_OUTCOMES or turn["reason"] == IMPORTED)
