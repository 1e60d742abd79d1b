"""OpenAI's fine-tuning format: one line per conversation, with the tools that its model saw.

Replies that are no training data have weight 0: assistant messages that an application wrote into a prompt, and turns
that are not trainable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise.chains import is_imported, is_trainable
from turnwise.exchange.conversations import conversations, reply_positions
from turnwise.store.session_records import SessionRecord
from turnwise.types import Json

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")
"""Fields of a message that the format has; sampled reasoning has no place in it."""


def lines(record: SessionRecord) -> Iterator[Json]:
    """Yield a training example per conversation of the session."""
    for conversation in conversations(record):
        trained = {
            position
            for position, view in zip(reply_positions(conversation.path), conversation.path, strict=True)
            if is_trainable(view.turn) or is_imported(view.turn)
        }
        messages = [_message(one, is_trained=place in trained) for place, one in enumerate(conversation.messages)]
        example: dict[str, Any] = {"messages": messages}
        if conversation.tools:
            example["tools"] = conversation.tools
        yield example


def _message(message: Json, *, is_trained: bool) -> Json:
    kept = {field: message[field] for field in MESSAGE_FIELDS if message.get(field) is not None}
    return kept if is_trained or message.get("role") != "assistant" else kept | {"weight": 0}
