"""Tools of OpenAI's Responses as chat functions, and function calls of a reply as the items that the client expects.

A namespace becomes functions named `<namespace>__<name>`. A custom (freeform) tool becomes a function of one string,
`input`. Tools that OpenAI runs on its own servers are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import orjson

from proxy.dialects.blocks import parts_of
from turnwise.errors import InvalidRequest
from turnwise.types import Json

SEPARATOR = "__"
INPUT = "input"
"""The argument that holds the text of a custom tool call."""
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclasses.dataclass(slots=True)
class ToolMap:
    """The tools of one request."""

    chat_tools: list[Json] = dataclasses.field(default_factory=list)
    dropped: list[str] = dataclasses.field(default_factory=list)
    """Types of the tools that were dropped."""
    namespaces: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Function name → namespace and name inside it."""
    custom: set[str] = dataclasses.field(default_factory=set)
    """Functions that stand for custom tools."""

    def call_item(self, name: str, call_id: str, arguments: str) -> Json:
        """Return a function call of a reply as the client's item, without `id` and `status`."""
        namespace, own_name = self.namespaces.get(name, ("", name))
        placed = {"namespace": namespace} if namespace else {}
        called = {"call_id": call_id, "name": own_name}
        if name in self.custom:
            return {"type": "custom_tool_call", **called, **placed, "input": custom_input(arguments)}
        return {"type": "function_call", **called, **placed, "arguments": arguments}


def read_tools(tools: Any) -> ToolMap:
    """Return the tools of a request.

    Raises:
        InvalidRequest: a tool or a namespace has the wrong shape.
    """
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
            if namespace:
                flat = flat_name(namespace, tool.get("name"))
                found.namespaces[flat] = (namespace, str(tool.get("name")))
                function["name"] = flat
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
    """Return a function of one string; a grammar for the string becomes a part of the description."""
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


def custom_arguments(text: str) -> str:
    return orjson.dumps({INPUT: text}).decode()


def chat_tool_choice(choice: Any) -> Any:
    """Return the tool choice as chat has it.

    Raises:
        InvalidRequest: the engine cannot be held to this choice.
    """
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        name = flat_name(choice.get("namespace"), choice.get("name"))
        return {"type": "function", "function": {"name": name}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return choice.get("mode") or "auto"
    raise InvalidRequest(
        f"a tool choice is none, auto, required, allowed_tools or one function, not {choice!r:.80}.",
        param="tool_choice",
    )
