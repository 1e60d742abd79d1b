"""Tools of OpenAI's Responses, freeform ones too, and items: as functions and messages, and back in a reply.

A namespace becomes functions named `<namespace>__<name>`. A custom (freeform) tool becomes a function of one string,
`input`. Tools that OpenAI runs on its own servers are dropped. Function calls of a reply become the items that the
client expects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from proxy.dialects.base import ENDED
from proxy.dialects.chat import check_kinds
from proxy.features.formats.blocks import Block, blocks_of
from proxy.features.formats.translated import chat_tool_call, failed_text, joined_content, parts_of
from turnwise.errors import InvalidRequest, NotFound
from turnwise.json_text import dumps
from turnwise.types import Json

SEPARATOR = "__"
INPUT = "input"
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
ID_PREFIXES = {"thinking": "rs", "text": "msg", "tool": "fc"}
HOSTED_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "tool_search_call", "tool_search_output", "compaction"),
        *("additional_tools", "ghost_snapshot", "configuration_update", "program_output"),
        *("computer_call_output", "mcp_approval_response", "program"),
    }
)
"""Items that only OpenAI's own service can read or produce, such as encrypted state. They are ignored."""
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
OUTPUTS = tuple(f"{call}_output" for call in CALLS)
FAILED = ("failed", "incomplete")
ASKING = ("user", "system", "developer")
"""Roles of the messages that are not replies."""


@dataclasses.dataclass(slots=True)
class ToolMap:
    """The tools of one request."""

    chat_tools: list[Json] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    origins: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Namespace, empty outside of one, and name of each tool in it, by the name of its function."""
    custom: set[str] = dataclasses.field(default_factory=set)

    def call_item(self, name: str, call_id: str, arguments: str) -> Json:
        """Return a function call of a reply as the client's item, without `id` and `status`."""
        namespace, own_name = self.origins.get(name, ("", name))
        placed = {"namespace": namespace} if namespace else {}
        called = {"call_id": call_id, "name": own_name}
        if name in self.custom:
            return {"type": "custom_tool_call", **called, **placed, "input": custom_input(arguments)}
        return {"type": "function_call", **called, **placed, "arguments": arguments}


def read_tools(tools: Any) -> ToolMap:
    found = ToolMap()
    _add_tools(found, parts_of(tools, "tools"), "")
    return found


def _add_tools(found: ToolMap, tools: Iterable[Json], namespace: str) -> None:
    for tool in tools:
        kind = tool.get("type")
        if kind == "namespace" and not namespace:
            _add_tools(found, parts_of(tool.get("tools"), "tools"), str(tool.get("name") or ""))
        elif kind in ("function", "custom"):
            function = _function(tool) if kind == "function" else _custom_function(tool)
            function["name"] = flat = flat_name(namespace, tool.get("name"))
            origin = (namespace, str(tool.get("name")))
            if found.origins.setdefault(flat, origin) != origin:
                names = " and ".join(".".join(filter(None, each)) for each in (found.origins[flat], origin))
                raise InvalidRequest(f"the tools {names} are both {flat!r:.80} here; rename one", param="tools")
            if kind == "custom":
                found.custom.add(str(function["name"]))
            found.chat_tools.append({"type": "function", "function": function})
        elif isinstance(kind, str):
            found.dropped.append(kind)
        else:
            raise InvalidRequest(f"a tool needs a `type`, such as 'function', not {kind!r:.40}.", param="tools")


def _function(tool: Json) -> Json:
    return {field: tool[field] for field in FUNCTION_FIELDS if tool.get(field) is not None}


def _custom_function(tool: Json) -> Json:
    wanted = tool.get("format") if isinstance(tool.get("format"), dict) else {}
    description = str(tool.get("description") or "")
    if isinstance(wanted, dict) and wanted.get("definition"):
        description += f"\n\n`{INPUT}` follows this {wanted.get('syntax', '')} grammar:\n{wanted['definition']}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"name": tool.get("name"), "description": description.strip(), "parameters": parameters}


def flat_name(namespace: object, name: object) -> str:
    return f"{namespace}{SEPARATOR}{name}" if namespace else str(name)


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool call from the function's arguments; broken arguments are the text itself."""
    try:
        text = orjson.loads(arguments)[INPUT]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments


def chat_tool_choice(choice: Any, dropped: Iterable[str]) -> Any:
    """Return the tool choice as chat has it; None where it goes with a tool that was dropped."""
    if isinstance(choice, str):
        return choice
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "function": {"name": flat_name(choice.get("namespace"), name)}}
        case {"type": "function" | "custom"}:
            raise InvalidRequest("`tool_choice` must have the `name` of a tool.", param="tool_choice")
        case {"type": "allowed_tools", "mode": "required", "tools": [*allowed]}:
            own = [tool for tool in parts_of(allowed, "tool_choice") if tool.get("type") in ("function", "custom")]
            return chat_tool_choice(own[0], dropped) if len(own) == 1 else "required" if own else None
        case {"type": "allowed_tools"}:
            return choice.get("mode") or "auto"
        case {"type": str(kind)} if any(kind.startswith(tool) or tool.startswith(kind) for tool in dropped):
            return None
    raise InvalidRequest(
        f"a tool choice is none, auto, required, allowed_tools or one function, not {choice!r:.80}.",
        param="tool_choice",
    )


def chat_messages(given: Any, failed_tool_text: str) -> list[Json]:
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
        _add_item(messages, item, failed_tool_text)
    return messages


def _add_item(messages: list[Json], item: Any, failed_tool_text: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message" if item.get("role") == "assistant" and not item.get("tool_calls"):
            # A model may go on with text after a call, which is then the later item of the two.
            _open_reply(messages, unless_holds=("content",))["content"] = _text(item.get("content"))
        case "message":
            messages.append(_asking_message(item))
        case "reasoning":
            _add_reasoning(messages, _text(item.get("content") or item.get("summary")))
        case str() if kind in CALLS:
            _open_reply(messages, unless_holds=()).setdefault("tool_calls", []).append(_chat_tool_call(item))
        case str() if kind in OUTPUTS:
            output = item.get("output")
            if kind == "shell_call_output":  # of each command: its texts and how it ended
                output = dumps(output).decode()
            call_id, content = item.get("call_id") or item.get("id"), _chat_content(output)
            if item.get("status") in FAILED:
                mark = {"type": "text", "text": failed_tool_text}
                content = failed_text(content, failed_tool_text) if isinstance(content, str) else [mark, *content]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
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


def _asking_message(item: Json) -> Json:
    """Return a message that is no reply.

    Raises:
        InvalidRequest: it is a message of chat that is an item of its own here.
    """
    if item.get("tool_calls"):
        raise InvalidRequest("send `tool_calls` as items of type function_call", param="input")
    if item.get("role") not in ASKING:
        raise InvalidRequest(
            f"a message of role {item.get('role')!r:.40} cannot be served; send one of {', '.join(ASKING)} or "
            "assistant, and outputs of tools as items of type function_call_output",
            param="input",
        )
    return {"role": item["role"], "content": _chat_content(item.get("content"))}


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
            arguments = orjson.dumps({INPUT: str(item.get("input") or "")}).decode()
        case "local_shell_call" | "shell_call" | "apply_patch_call":
            action = item.get("action") or item.get("operation")
            arguments = dumps(action if isinstance(action, dict) else {}).decode()
        case _:
            arguments = item.get("arguments") or ""
    name = flat_name(item.get("namespace"), item.get("name") or item["type"].removesuffix("_call"))
    return chat_tool_call(item.get("call_id"), name, arguments)


def _chat_content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    return joined_content([_chat_part(part) for part in parts_of(content, "input")])


def _chat_part(part: Json) -> Json:
    kind = part.get("type")
    if kind in TEXT_PARTS:
        check_kinds(part, {"text": str})
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise InvalidRequest(
        f"a content part of type {kind!r:.40} cannot be served; send input_text, or input_image with `image_url`",
        param="input",
    )


def _text(parts: Any) -> str:
    if parts is None or isinstance(parts, str):
        return parts or ""
    found = []
    for part in parts_of(parts, "input"):
        check_kinds(part, {"refusal": str})
        is_refusal = part.get("type") == "refusal"
        found.append(_chat_part({"type": "text"} | ({"text": part.get("refusal")} if is_refusal else part)))
    if any(part["type"] == "image_url" for part in found):
        raise InvalidRequest("an assistant's message with images cannot be served; send text", param="input")
    return "".join(part["text"] for part in found)


def item_status(block: Block, last: Block | None, finish_reason: str | None) -> str:
    """Return the status of a block in which a reply may be cut off: a call's arguments, or the last one that grew."""
    is_cut = block is last and block.kind != "tool" and finish_reason not in ENDED
    is_cut = is_cut or block.is_cut_call(finish_reason) or block.shown() is not block
    return "incomplete" if is_cut else "completed"


def output_item(
    block: Block, response_id: str, tools: ToolMap, logprobs: Iterable[Json] = (), status: str = "completed"
) -> Json:
    """Return a block as an item of the response's output; its id is derived from the response's id."""
    item: Json = {"id": item_id(block, response_id), "status": status}
    match block.kind:
        case "thinking":
            content = [{"type": "reasoning_text", "text": block.text}]
            return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        case "text":
            part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": list(logprobs)}
            return item | {"type": "message", "role": "assistant", "content": [part]}
        case _:
            return item | tools.call_item(block.name, block.tool_call_id, block.text)


def item_id(block: Block, response_id: str) -> str:
    return f"{ID_PREFIXES[block.kind]}_{response_id.partition('_')[2]}_{block.index}"


def reply_blocks(message: Json | None) -> list[Block]:
    return list(blocks_of(message)) or [Block("text", "")]


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
    blocks = reply_blocks(stored[turn_id]) if turn_id in stored else []
    return output_item(blocks[index], turn_id, tools) if index < len(blocks) else item
