"""OpenAI's fine-tuning format: one line per conversation, with the tools that its model saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnwise.exchange.conversations import conversations
from turnwise.store.session_records import SessionRecord
from turnwise.types import Json

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")
"""Fields of a message that the format has; sampled reasoning has no place in it."""


def lines(record: SessionRecord) -> Iterator[Json]:
    """Yield a training example per conversation of the session."""
    for conversation in conversations(record):
        example: dict[str, Any] = {"messages": [_message(message) for message in conversation.messages]}
        if conversation.tools:
            example["tools"] = conversation.tools
        yield example


def _message(message: Json) -> Json:
    return {field: message[field] for field in MESSAGE_FIELDS if message.get(field) is not None}
