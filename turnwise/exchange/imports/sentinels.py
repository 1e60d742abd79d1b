"""Where a chat template renders a conversation: texts, calls' names and arguments become sentinels and are searched.

A text may occur in another one by chance, and a template may leave a part out, repeat it, or end a reply twice. A
sentinel occurs nowhere else, so what comes back tells what the template does: each part of a reply must be there once,
in order, and each message before it, in order; only results and schemas of tools may be left out, and are counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any

from turnwise.errors import BadLine
from turnwise.exchange.imports.values import value_of_json
from turnwise.types import Json

PATTERN = re.compile(r"Qz(\d+)n(\d+)zQ")
Place = tuple[int, int]
"""Number of a part of a reply (its reasoning, its content, then each call), and of a text in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MarkedReply:
    """A reply with a sentinel in place of each of its texts."""

    message: Json
    texts: dict[Place, str]
    """The text that each sentinel stands for."""

    def end_in(self, rendered: str, ends: Collection[str]) -> tuple[str, str]:
        """Return the first end token after a rendered reply's last part and all text from it on; empty without one.

        Raises:
            BadLine: a part of the reply is left out, repeated or out of order.
        """
        found = [((int(match[1]), int(match[2])), match.end()) for match in PATTERN.finditer(rendered)]
        places = [place for place, _ in found]
        if missing := next((text for place, text in self.texts.items() if place not in places), None):
            raise BadLine(f"the template leaves {missing!r:.60} out of the reply")
        if len(places) > len(self.texts):
            twice = next(place for place in places if places.count(place) > 1)
            raise BadLine(f"the template renders {self.texts[twice]!r:.60} of the reply twice")
        if (parts := [part for part, _ in places]) != sorted(parts):
            raise BadLine("the template renders the reasoning, the content and the calls of the reply in another order")
        tail = rendered[found[-1][1] :]
        starts = [(tail.index(end), -len(end), end) for end in ends if end in tail]
        if not starts:
            return "", ""
        start, _, end = min(starts)
        return end, tail[start:]


def mark_reply(message: Json) -> MarkedReply:
    """Return a reply with sentinels; texts that are blank stay, since a template may leave them out.

    Raises:
        BadLine: the arguments of a call are not a JSON object.
    """
    texts: dict[Place, str] = {}

    def marked(part: int, value: Any) -> Any:
        match value:
            case str():
                texts[part, len(texts)] = value
                return f"Qz{part}n{len(texts) - 1}zQ"
            case dict():
                return {marked(part, key): marked(part, each) for key, each in value.items()}
            case list():
                return [marked(part, each) for each in value]
        return value

    reply = dict(message)
    if (message.get("reasoning") or "").strip():
        reply["reasoning"] = marked(0, message["reasoning"])
    content = message.get("content")
    if isinstance(content, str):
        reply["content"] = marked(1, content) if content.strip() else content
    elif content:
        parts = [part if isinstance(part, str) else part["text"] for part in content]
        reply["content"] = [{"type": "text", "text": marked(1, text) if text.strip() else text} for text in parts]
    calls = message.get("tool_calls") or []
    if calls:
        reply["tool_calls"] = [
            call | {"function": {"name": marked(number, name), "arguments": marked(number, arguments)}}
            for number, call in enumerate(calls, 2)
            for name, arguments in [(call["function"]["name"], call_arguments(call))]
        ]
    return MarkedReply(reply, texts)


_PROMPTED = re.compile(r"Qp\d+pQ")


@dataclasses.dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """The messages before a reply and the schemas of its tools, with sentinels."""

    messages: list[Json]
    tools: list[Json]
    texts: dict[str, tuple[int, str]]
    """The text of each sentinel, and the number of its message; that of a schema is -1."""

    def leaves_tools_out(self, rendered: str) -> bool:
        """Return whether a rendered conversation lacks a result or a schema of a tool.

        Raises:
            BadLine: it lacks another text of a message, or has those of users and replies in another order.
        """
        found = dict.fromkeys(_PROMPTED.findall(rendered))
        missing = [self.texts[name] for name in self.texts.keys() - found.keys()]
        for number, text in missing:
            if number >= 0 and self.messages[number]["role"] != "tool":
                raise BadLine(f"the template leaves {text!r:.60} of message {number + 1} out of the prompt")
        told = [number for number, _ in map(self.texts.__getitem__, found) if number >= 0]
        order = [number for number in told if self.messages[number]["role"] in ("user", "assistant")]
        if moved := next((late for early, late in itertools.pairwise(order) if late < early), None):
            raise BadLine(f"the template moves message {moved + 1} behind later ones in the prompt")
        return bool(missing)


def mark_prompt(messages: Sequence[Json], tools: Sequence[Json]) -> MarkedPrompt:
    """Return the contents and calls of messages, and the names in schemas, as sentinels; reasoning stays as it is.

    Templates leave out the reasoning of earlier replies, as they should.
    """
    texts: dict[str, tuple[int, str]] = {}

    def marked(number: int, text: str) -> str:
        if not text.strip():
            return text
        name = f"Qp{len(texts)}pQ"
        texts[name] = number, text
        return name

    def schema(tool: Json) -> Json:
        function = dict(tool["function"])
        function["name"] = marked(-1, function["name"])
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and isinstance(parameters.get("properties"), dict):
            named = {marked(-1, name): value for name, value in parameters["properties"].items()}
            function["parameters"] = parameters | {"properties": named}
        return tool | {"function": function}

    def message(number: int, given: Json) -> Json:
        content, calls = given.get("content"), given.get("tool_calls")
        if isinstance(content, str):
            content = marked(number, content)
        elif content:
            content = [
                part | {"text": marked(number, part["text"])} if isinstance(part, dict) and "text" in part else part
                for part in content
            ]
        if calls:
            named = [(call, call["function"]) for call in calls]
            calls = [call | {"function": of | {"name": marked(number, of["name"])}} for call, of in named]
        return given | ({"content": content} if "content" in given else {}) | ({"tool_calls": calls} if calls else {})

    shown = [message(number, given) for number, given in enumerate(messages)]
    return MarkedPrompt(shown, [schema(tool) for tool in tools], texts)


def call_arguments(call: Json) -> Json:
    """Return the arguments of a call.

    Raises:
        BadLine: they are not a JSON object: a template renders others as no arguments.
    """
    text = call["function"]["arguments"]
    found = value_of_json(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise BadLine(f"the arguments of {call['function']['name']!r:.60} are {text!r:.80}, not a JSON object")
    return found
