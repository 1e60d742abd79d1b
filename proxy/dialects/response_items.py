"""Items of OpenAI's Responses: input items to chat messages, blocks of a reply to output items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.blocks import Block, blocks_of, chat_tool_call, joined_content, parts_of
from proxy.dialects.response_tools import ToolMap, custom_arguments, flat_name
from turnwise.errors import InvalidRequest, NotFound
from turnwise.json_text import dumps
from turnwise.types import Json

ID_PREFIXES = {"thinking": "rs", "text": "msg", "tool": "fc"}
HOSTED_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "tool_search_call", "tool_search_output", "compaction"),
        *("compaction_trigger", "additional_tools", "ghost_snapshot"),
    }
)
"""Items that only OpenAI's own service can read or produce, such as encrypted state. They are ignored."""
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
            _add_reasoning(messages, _text(item.get("content") or item.get("summary")))
        case "function_call" | "custom_tool_call" | "local_shell_call":
            _open_reply(messages, unless_holds=()).setdefault("tool_calls", []).append(_chat_tool_call(item))
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            call_id = item.get("call_id") or item.get("id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _chat_content(item.get("output"))})
        case "item_reference":
            raise NotFound(
                f"item {item.get('id')!r:.80} is not stored; send the item itself",
                param="input",
                code="item_not_found",
            )
        case str() if kind in HOSTED_ITEMS:
            pass
        case _:
            raise InvalidRequest(
                f"an input item of type {kind!r:.40} cannot be served; send messages, reasoning, tool calls and "
                "their outputs",
                param="input",
            )


def _add_reasoning(messages: list[Json], text: str) -> None:
    if text:
        _open_reply(messages, unless_holds=("reasoning", "content", "tool_calls"))["reasoning"] = text


def _open_reply(messages: list[Json], *, unless_holds: tuple[str, ...]) -> Json:
    """Return the assistant message of an item: the last message if it can take the item, else a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(field) for field in unless_holds):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _chat_tool_call(item: Json) -> Json:
    match item["type"]:
        case "custom_tool_call":
            arguments = custom_arguments(str(item.get("input") or ""))
        case "local_shell_call":
            action = item.get("action")
            arguments = dumps(action if isinstance(action, dict) else {}).decode()
        case _:
            arguments = item.get("arguments") or ""
    name = flat_name(item.get("namespace"), item.get("name") or "local_shell")
    return chat_tool_call(item.get("call_id"), name, arguments)


def _chat_content(content: Any) -> Any:
    """Return a text if all parts are text, else chat parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined_content([_chat_part(part) for part in parts_of(content, "input")])


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


def output_item(block: Block, index: int, response_id: str, logprobs: list[Json], tools: ToolMap) -> Json:
    """Return a block as an item of the response's output; its id is derived from the response's id."""
    item: Json = {"id": item_id(block, index, response_id), "status": "completed"}
    match block.kind:
        case "thinking":
            content = [{"type": "reasoning_text", "text": block.text}]
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        case "text":
            part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}
            return item | {"type": "message", "role": "assistant", "content": [part]}
        case _:
            return item | tools.call_item(block.name, block.tool_call_id, block.text)


def item_id(block: Block, index: int, response_id: str) -> str:
    return f"{ID_PREFIXES[block.kind]}_{response_id.partition('_')[2]}_{index}"


def referenced_turn(reference: Json) -> tuple[str, int]:
    """Return the turn and the index of the item that an `item_reference` names; an empty turn for a foreign id."""
    prefix, _, rest = str(reference.get("id")).partition("_")
    call_id, _, index = rest.rpartition("_")
    if prefix in ID_PREFIXES.values() and call_id and index.isascii() and index.isdigit():
        return f"resp_{call_id}", int(index)
    return "", 0


def is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "item_reference"


def resolved(item: Any, stored: Mapping[str, Json], tools: ToolMap) -> Any:
    """Return an input item, or the stored item that it names; `stored` holds replies by turn id."""
    if not is_reference(item):
        return item
    turn_id, index = referenced_turn(item)
    blocks = (list(blocks_of(stored[turn_id])) or [Block("text", "")]) if turn_id in stored else []
    return output_item(blocks[index], index, turn_id, [], tools) if index < len(blocks) else item
