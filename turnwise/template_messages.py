"""Messages in the form in which vLLM passes them to a chat template.

The proxy continues conversations with it, and imports tokenise conversations with it, so both render what the engine
renders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from turnwise.types import Json

ContentFormat = Literal["string", "openai"]
"""How a template reads a message's content: as one text, or as a list of parts."""


def shape_conversation(messages: Sequence[Json], content_format: ContentFormat, *, has_developer: bool) -> list[Json]:
    """Return a conversation as vLLM passes it to the template.

    Args:
        messages: The messages of a chat request.
        content_format: How the template reads contents.
        has_developer: Whether the template knows the role `developer`; otherwise such messages become system messages.

    Raises:
        ValueError: a content is neither text nor a list of parts.
    """
    conversation = [_shape_message(message, content_format) for message in messages]
    return conversation if has_developer else _merge_system(conversation)


def _shape_message(message: Json, content_format: ContentFormat) -> Json:
    """Return the message without the fields that vLLM drops."""
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise ValueError(f"content {content!r:.80} is neither text nor a list of parts")  # noqa: TRY004  as documented
    parts = [content] if isinstance(content, str) else [_part_text(part) for part in content or []]
    shaped: Json = {"role": message.get("role")}
    if content_format == "openai" and shaped["role"] != "tool":
        shaped["content"] = [{"type": "text", "text": text} for text in parts]
    else:
        shaped["content"] = "\n".join(parts)
    for field in ("name", "tool_call_id"):
        if isinstance(message.get(field), str):
            shaped[field] = message[field]
    if message.get("role") == "assistant":
        _add_assistant_fields(shaped, message)
    return shaped


def _add_assistant_fields(shaped: Json, message: Json) -> None:
    if calls := message.get("tool_calls"):
        shaped["tool_calls"] = [_call_with_parsed_arguments(call) for call in calls]
    thinking = message.get("reasoning", message.get("reasoning_content"))
    if thinking is not None:
        shaped["reasoning"] = shaped["reasoning_content"] = thinking


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        return str(part.get("text") or part.get("refusal") or "")
    return str(part)


def _call_with_parsed_arguments(call: Json) -> Json:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    function["arguments"] = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": function}


def _merge_system(conversation: list[Json]) -> list[Json]:
    """Turn developer messages into one system message at the front, as vLLM does for templates that know none."""
    if not any(message["role"] == "developer" for message in conversation):
        return conversation
    system = [m for m in conversation if m["role"] in ("developer", "system")]
    texts = [
        m["content"] if isinstance(m["content"], str) else "\n".join(part["text"] for part in m["content"])
        for m in system
    ]
    first = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [first, *(m for m in conversation if m["role"] not in ("developer", "system"))]
