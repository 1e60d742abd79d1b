"""A request of Anthropic's Messages, translated to a chat request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from proxy.dialects.blocks import chat_tool, chat_tool_call, joined_content, parts_of
from proxy.dialects.chat import check_kinds
from turnwise.errors import InvalidRequest
from turnwise.json_text import dumps
from turnwise.types import Json

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts that the engine does not know → the nearest one that it knows."""
BOOKKEEPING = "x-anthropic-billing-header"
"""Prefix of a system block that only Anthropic's service reads, and that changes with every call."""
_DATE = re.compile(r"_\d{8}$")
TRANSLATED = frozenset(
    {
        *("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config"),
        *("stream_options", "thread"),
    }
)
IGNORED = frozenset(
    {
        *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "service_tier"),
        *("betas", "mcp_servers", "speed"),
    }
)
"""Fields about Anthropic's own service."""


def chat_body(body: Json) -> Json:
    """Translate a request to a chat request.

    Raises:
        InvalidRequest: it asks for something that cannot be served, or a field has the wrong shape.
    """
    check_kinds(body, {"messages": list, "tools": list, "thinking": dict, "output_config": dict, "tool_choice": dict})
    chat = {field: value for field, value in body.items() if field not in TRANSLATED | IGNORED}
    chat["messages"] = [*_system(body.get("system")), *chat_messages(body.get("messages") or [])]
    if tools := [_chat_tool(tool) for tool in body.get("tools") or () if not is_server_tool(tool)]:
        chat["tools"] = tools
    if (choice := body.get("tool_choice")) and (tools or not body.get("tools")):
        chat |= _chat_tool_choice(choice)
    if stops := body.get("stop_sequences"):
        chat["stop"] = stops
    if (body.get("thinking") or {}).get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    chat |= _chat_output(body.get("output_config") or {}, chat)
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def chat_messages(messages: list[Any]) -> Iterator[Json]:
    """Translate messages to chat messages.

    Raises:
        InvalidRequest: a message or block has the wrong shape.
    """
    for message in messages:
        if not isinstance(message, dict):
            raise InvalidRequest(f"`messages` must hold objects, not {message!r:.80}.", param="messages")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise InvalidRequest(
                f"`content` must be a text or a list of blocks, not {content!r:.80}.", param="messages"
            )
        match message.get("role"):
            case "assistant":
                yield _assistant_message(blocks)
            case "system":
                yield from _system(content)
            case "user":
                yield from _user_messages(blocks)
            case other:
                raise InvalidRequest(f"a role is 'user' or 'assistant', not {other!r:.40}.", param="messages")


def _system(system: Any) -> Iterator[Json]:
    texts = (
        [system] if isinstance(system, str) else [str(block.get("text", "")) for block in parts_of(system, "system")]
    )
    if kept := [text for text in texts if text and not text.startswith(BOOKKEEPING)]:
        yield {"role": "system", "content": "\n".join(kept)}


def _assistant_message(blocks: list[Json]) -> Json:
    message: Json = {"role": "assistant", "content": None}
    if texts := [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]:
        message["content"] = "".join(texts)
    if thinking := "".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"):
        message["reasoning"] = thinking
    if calls := [_chat_tool_call(block) for block in blocks if block.get("type") == "tool_use"]:
        message["tool_calls"] = calls
    return message


def _chat_tool_call(block: Json) -> Json:
    return chat_tool_call(block.get("id"), block.get("name"), dumps(block.get("input") or {}).decode())


def _user_messages(blocks: list[Json]) -> Iterator[Json]:
    """Yield one message per tool result, then one message with all other blocks."""
    rest = []
    for block in blocks:
        if block.get("type") != "tool_result":
            rest.append(_chat_part(block))
            continue
        content = block.get("content") or ""
        parts = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else [_chat_part(one) for one in parts_of(content, "content")]
        )
        texts = [part["text"] for part in parts if part["type"] == "text"]
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": "\n".join(texts)}
        rest += [part for part in parts if part["type"] != "text"]
    if rest:
        yield {"role": "user", "content": joined_content(rest)}


def _chat_part(block: Json) -> Json:
    """Translate a text or image block to a chat part."""
    check_kinds(block, {"source": dict})
    source = block.get("source") or {}
    match block.get("type"), source.get("type"):
        case "text", _:
            return {"type": "text", "text": str(block.get("text", ""))}
        case "image", "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        case "image", kind:
            raise InvalidRequest(
                f"an image with a source of type {kind!r:.40} cannot be served; send its source as `base64` or `url`",
                param="messages",
            )
        case "document", "text":
            return {"type": "text", "text": str(source.get("data", ""))}
        case kind, _:
            raise InvalidRequest(
                f"a block of type {kind!r:.40} cannot be served; send text or images", param="messages"
            )


def is_server_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] != "custom"


def server_tool_name(tool: Json) -> str:
    return _DATE.sub("", str(tool["type"]))


def _chat_tool(tool: Any) -> Json:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"a tool must be an object with `name` and `input_schema`, not {tool!r:.80}", param="tools"
        )
    return chat_tool(tool.get("name"), tool.get("description"), tool.get("input_schema") or {})


def _chat_tool_choice(choice: Json) -> Json:
    check_kinds(choice, {"type": str})
    chat: Json = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if choice.get("type") == "tool":
        return chat | {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    if choice.get("type") not in TOOL_CHOICES:
        raise InvalidRequest(f"a tool choice is auto, any, tool or none, not {choice!r:.80}.", param="tool_choice")
    return chat | {"tool_choice": TOOL_CHOICES[choice["type"]]}


def previous_message_id(thread: Any) -> str | None:
    """Return the id of the message that a call continues; None if the request holds the whole conversation."""
    if not isinstance(thread, dict) or thread.get("type") != "continue":
        return None
    previous = thread.get("previous_message_id")
    if not isinstance(previous, str):
        raise InvalidRequest(f"`previous_message_id` must be a message's id, not {previous!r:.80}.", param="thread")
    return previous


def _chat_output(config: Json, chat: Json) -> Json:
    check_kinds(config, {"effort": str, "format": dict})
    wanted: Json = {}
    if (effort := config.get("effort")) and "reasoning_effort" not in chat:
        wanted["reasoning_effort"] = EFFORTS.get(effort, effort)
    if schema := (config.get("format") or {}).get("schema"):
        wanted["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    return wanted
