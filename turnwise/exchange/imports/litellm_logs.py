"""LiteLLM's logs as JSON Lines: its standard logging payload, and rows of its spend logs.

Calls with the same session or trace are one session. A call's reply is trained; what its prompt repeats of earlier
replies joins their turns.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from turnwise.exchange.imports.drafts import BadLine, Conversation, Draft, SkippedLine
from turnwise.exchange.imports.messages import chat_message, chat_messages, parsed, tool_schemas
from turnwise.types import Json

CHAT_CALLS = ("completion", "acompletion", "anthropic_messages", "")
SESSION_FIELDS = ("session_id", "litellm_session_id", "trace_id", "litellm_trace_id")


def key_of(document: Json) -> str | None:
    """Return the session or trace of a call; None for a call that has neither."""
    metadata = document.get("metadata")
    for place in (document, metadata if isinstance(metadata, dict) else {}):
        for field in SESSION_FIELDS:
            if isinstance(place.get(field), str) and place[field]:
                return str(place[field])
    return None


def drafts_of(document: Json) -> list[Draft]:
    """Return the session with this call.

    Raises:
        SkippedLine: it is not a chat completion, or it failed.
        BadLine: messages or response are missing or broken.
    """
    kind = str(document.get("call_type") or "")
    if kind not in CHAT_CALLS:
        raise SkippedLine(f"a call of type {kind}")
    if document.get("status") == "failure":
        raise SkippedLine("a failed call")
    body = _object(document.get("proxy_server_request")).get("body", document.get("proxy_server_request"))
    request = _object(body)
    found = document.get("messages") or request.get("messages")
    prompt = chat_messages(parsed(found) if isinstance(found, str) else found)
    parameters = _object(document.get("model_parameters")) or _object(document.get("optional_params"))
    reply = reply_of(document.get("response"))
    created_at = instant(document.get("endTime") or document.get("end_time"))
    conversation = Conversation(
        messages=[*prompt, reply],
        trained=(len(prompt),),
        tools=tool_schemas(parameters.get("tools") or request.get("tools")),
        model=str(document.get("model") or ""),
        created_at={} if created_at is None else {len(prompt): created_at},
    )
    return [Draft(conversations=[conversation])]


def reply_of(response: Any) -> Json:
    """Return the assistant's message of a logged response: a completion, a message or its text.

    Raises:
        BadLine: it has no message.
    """
    value = parsed(response) if isinstance(response, str) and response[:1] in "{[" else response
    if isinstance(value, str) and value:
        return {"role": "assistant", "content": value}
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and value.get("choices"):
        value = value["choices"][0].get("message")
    if not isinstance(value, dict) or ("content" not in value and "tool_calls" not in value):
        raise BadLine(f"its response {response!r:.80} has no message; was content logging turned off?")
    return chat_message({"role": "assistant"} | value)


def instant(value: Any) -> dt.datetime | None:
    """Return a logged time, in seconds since 1970 or as ISO text; None for anything else."""
    try:
        if isinstance(value, int | float):
            return dt.datetime.fromtimestamp(value, dt.UTC)
        found = dt.datetime.fromisoformat(value)
    except (TypeError, ValueError, OSError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def _object(value: Any) -> Json:
    found = parsed(value) if isinstance(value, str) and value.startswith("{") else value
    return found if isinstance(found, dict) else {}
