"""Import of LiteLLM's logs: its standard logging payload, and rows of its spend logs.

Calls with the same session or trace are one session. A call's reply is trained; what its prompt repeats of earlier
replies joins their turns.
"""

from __future__ import annotations

from typing import Any

from turnwise.errors import SkippedLine
from turnwise.exchange.imports.values import value_of_json
from turnwise.types import Json
from turnwise_formats.values import as_object, call_draft, message_list, reply_of, with_system

CHAT_CALLS = ("completion", "acompletion", "anthropic_messages", "")
TOOL_FIELDS = ("tools", "functions")
SESSION_FIELDS = ("session_id", "litellm_session_id", "trace_id", "litellm_trace_id")


def key_of(document: Json) -> str | None:
    """Return the session or trace of a call; None for a call that has neither."""
    metadata = document.get("metadata")
    for place in (document, metadata if isinstance(metadata, dict) else {}):
        for field in SESSION_FIELDS:
            if isinstance(place.get(field), str) and place[field]:
                return str(place[field])
    return None


def _messages(found: Any) -> Any:
    return value_of_json(found) if isinstance(found, str) and found else found


def drafts_of(document: Json) -> list[Json]:
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
    body = as_object(document.get("proxy_server_request")).get("body", document.get("proxy_server_request"))
    request = as_object(body)
    found = _messages(document.get("messages")) or _messages(request.get("messages"))
    parameters = as_object(document.get("model_parameters")) or as_object(document.get("optional_params"))
    conversation = call_draft(
        with_system(parameters | request, message_list(found)),
        reply_of(document.get("response")),
        tools=next((one[field] for one in (parameters, request) for field in TOOL_FIELDS if one.get(field)), None),
        model=str(document.get("model") or ""),
        ended=document.get("endTime") or document.get("end_time"),
    )
    return [{"conversations": [conversation]}]
