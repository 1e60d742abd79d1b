"""Items of OpenAI's Responses: input items to chat messages, blocks of a reply to output items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxy.dialects.blocks import Block, parts_of
from turnwise.errors import InvalidRequest
from turnwise.types import Json

ID_PREFIXES = {"thinking": "rs", "text": "msg", "tool": "fc"}
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_messages(given: Any) -> list[Json]:
    """Translate input items to chat messages.

    Raises:
        InvalidRequest: an item has the wrong shape or an unknown type.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequest(f"`input` must be a text or a list of items, not {given!r:.80}.", param="input")
    messages: list[Json] = []
    for item in given:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Json], item: Any) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message" if item.get("role") == "assistant":
            _open_reply(messages, unless_holds=("content", "tool_calls"))["content"] = _text(item.get("content"))
        case "message":
            messages.append({"role": item.get("role"), "content": _chat_content(item.get("content"))})
        case "reasoning":
            reply = _open_reply(messages, unless_holds=("reasoning", "content", "tool_calls"))
            reply["reasoning"] = _text(item.get("content") or item.get("summary"))
        case "function_call":
            _open_reply(messages, unless_holds=()).setdefault("tool_calls", []).append(_chat_tool_call(item))
        case "function_call_output":
            result = _chat_content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": result})
        case _:
            raise InvalidRequest(
                f"an input item of type {kind!r:.40} cannot be served; send messages, reasoning, function calls and "
                "their outputs",
                param="input",
            )


def _open_reply(messages: list[Json], *, unless_holds: tuple[str, ...]) -> Json:
    """Return the assistant message of an item: the last message if it can take the item, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(field) for field in unless_holds):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _chat_tool_call(item: Json) -> Json:
    function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _chat_content(content: Any) -> Any:
    """Return a text if all parts are text, else chat parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_chat_part(part) for part in parts_of(content, "input")]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _chat_part(part: Json) -> Json:
    kind = part.get("type")
    if kind in TEXT_PARTS:
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise InvalidRequest(
        f"a content part of type {kind!r:.40} cannot be served; send input_text, or input_image with `image_url`",
        param="input",
    )


def _text(parts: Any) -> str:
    """Join the parts of a reply's text."""
    if parts is None or isinstance(parts, str):
        return parts or ""
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts_of(parts, "input"))


def chat_tools(tools: Iterable[Any]) -> list[Json]:
    """Return the tools as chat has them.

    Raises:
        InvalidRequest: a tool that OpenAI's own service would have to run.
    """
    found = []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequest(
                f"only tools of type 'function' can be served, not {tool!r:.80}; the client runs them", param="tools"
            )
        fields = ("name", "description", "parameters", "strict")
        function = {field: tool[field] for field in fields if tool.get(field) is not None}
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(choice: Any) -> Any:
    """Return the tool choice as chat has it.

    Raises:
        InvalidRequest: a choice that the engine cannot be held to.
    """
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise InvalidRequest(
        f"a tool choice is none, auto, required or one function, not {choice!r:.80}.", param="tool_choice"
    )


def output_item(block: Block, index: int, response_id: str, logprobs: list[Json]) -> Json:
    """Return a block as an item of the response's output; ids follow from the response's own."""
    item_id = f"{ID_PREFIXES[block.kind]}_{response_id.partition('_')[2]}_{index}"
    item: Json = {"id": item_id, "status": "completed"}
    match block.kind:
        case "thinking":
            content = [{"type": "reasoning_text", "text": block.text}]
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        case "text":
            part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
            return item | {"type": "message", "role": "assistant", "content": [part]}
        case _:
            called = {"call_id": block.tool_call_id, "name": block.name, "arguments": block.text}
            return item | {"type": "function_call", **called}
