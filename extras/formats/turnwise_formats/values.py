"""Values of logs: JSON text that stands for a value, and times."""

from __future__ import annotations

import datetime as dt
from typing import Any

from turnwise.errors import BadLine
from turnwise.types import Json, value_of_json


def as_object(value: Any) -> Json:
    """Return an object, which may be JSON text; an empty one for anything else."""
    found = value_of_json(value) if isinstance(value, str) and value.startswith("{") else value
    return found if isinstance(found, dict) else {}


def message_list(found: Any) -> list[Json]:
    """Return a list of messages, whose form Turnwise checks.

    Raises:
        BadLine: it is no list.
    """
    if not isinstance(found, list) or not found:
        raise BadLine(f"its messages are {found!r:.80}, not a list of messages")
    return found


def reply_of(response: Any) -> Json:
    """Return the assistant's message of a logged response: a completion, a message or its text.

    Raises:
        BadLine: it has no message.
    """
    value = value_of_json(response) if isinstance(response, str) and response[:1] in "{[" else response
    if isinstance(value, str) and value:
        return {"role": "assistant", "content": value}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and value.get("choices"):
        value = value["choices"][0].get("message")
    if not isinstance(value, dict) or ("content" not in value and "tool_calls" not in value):
        raise BadLine(f"its response {response!r:.80} has no message; was content logging turned off?")
    return {"role": "assistant"} | value


def instant(value: Any) -> dt.datetime | None:
    """Return a logged time, in seconds since 1970 or as ISO text; None for anything else."""
    try:
        if isinstance(value, int | float):
            return dt.datetime.fromtimestamp(value, dt.UTC)
        found = dt.datetime.fromisoformat(value)
    except (TypeError, ValueError, OSError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def call_draft(prompt: list[Json], reply: Json, *, tools: Any, model: str, ended: Any) -> Json:
    """Return a conversation of one logged call: its prompt, and the reply that is trained."""
    created_at = instant(ended)
    return {
        "messages": [*prompt, reply],
        "trained": [len(prompt)],
        "tools": tools,
        "model": model,
        "created_at": {} if created_at is None else {len(prompt): created_at},
    }
