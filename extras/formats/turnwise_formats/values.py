"""Values of imported logs: JSON text, times, and texts that were cut when they were logged, which are refused."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.values import value_of_json
from turnwise.types import Json

CUT = re.compile(r"litellm_truncated|<truncated[^<>]{0,80}>|@@@langfuseMedia:|redacted-by-litellm")
"""What LiteLLM and Langfuse write in the place of a text that they cut or took out."""
SYSTEM_FIELDS = ("system", "instructions", "system_prompt", "system_instruction", "systemInstruction")


def check_whole(found: Any) -> None:
    """Check that no text of a logged value was cut or taken out.

    Raises:
        BadLine: one was; what the model read or said is not known.
    """
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str) and (cut := CUT.search(value)):
            raise BadLine(f"a text was cut when it was logged: it has {cut[0]!r}")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def with_system(request: Json, messages: list[Json]) -> list[Json]:
    """Return the messages of a logged request after the system prompt that it may have beside them.

    Raises:
        BadLine: there are several, or the messages begin with another one.
    """
    given = [request[field] for field in SYSTEM_FIELDS if request.get(field)]
    if len(given) > 1 or (given and isinstance(messages[0], dict) and messages[0].get("role") == "system"):
        raise BadLine("it has several system prompts")
    return [*({"role": "system", "content": content} for content in given), *messages]


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


SAMPLED_ENDS = (
    *("stop", "eos", "eos_token", "complete", "tool_call", "tool_calls", "function_call", "end_turn", "tool_use"),
    "stop_sequence",
)
"""Reasons of an end that the model has sampled, in the words of several formats."""


def reply_of(response: Any) -> Json:
    """Return the assistant's message of a logged response: a completion, a message or its text.

    Raises:
        BadLine: it has no message, or several, or one that was cut off.
    """
    value = value_of_json(response) if isinstance(response, str) and response[:1] in ("{", "[") else response
    if isinstance(value, str) and value:
        return {"role": "assistant", "content": value}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and value.get("choices"):
        if len(value["choices"]) > 1:
            raise BadLine(f"its response has {len(value['choices'])} choices, and which of them was used is not known")
        value = value["choices"][0]
        _check_ended(value)
        value = value.get("message")
    if isinstance(value, dict):
        _check_ended(value)
    if not isinstance(value, dict) or ("content" not in value and "tool_calls" not in value):
        raise BadLine(f"its response {response!r:.80} has no message; was content logging turned off?")
    return {"role": "assistant"} | value


def _check_ended(response: Json) -> None:
    field = "finish_reason" if response.get("finish_reason") else "stop_reason"  # vLLM's is what ended the text
    reason = response.get(field)
    if reason and str(reason).lower() not in SAMPLED_ENDS:
        raise BadLine(f"its reply was cut off: its {field.replace('_', ' ')} is {reason!r}")
    if response.get("incomplete_details"):
        raise BadLine(f"its reply was cut off: its incomplete_details are {response['incomplete_details']!r:.80}")


def instant(value: Any) -> dt.datetime | None:
    """Return a logged time, in seconds since 1970 or as ISO text; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, int | float):
            return dt.datetime.fromtimestamp(value, dt.UTC)
        found = dt.datetime.fromisoformat(value)
    except (TypeError, ValueError, OSError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def call_draft(prompt: list[Json], reply: Json, *, tools: Any, model: str, ended: Any) -> Json:
    """Return a conversation of one logged call: its prompt, and the reply that is trained.

    Raises:
        BadLine: a text was cut when it was logged.
    """
    check_whole([prompt, reply, tools])
    created_at = instant(ended)
    return {
        "messages": [*prompt, reply],
        "trained": [len(prompt)],
        "tools": tools,
        "model": model,
        "created_at": {} if created_at is None else {len(prompt): created_at},
    }
