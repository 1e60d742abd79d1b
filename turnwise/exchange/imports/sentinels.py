"""Where a chat template renders a reply: its texts, calls' names and arguments are replaced by sentinels and searched.

A text may occur in another one by chance, and a template may leave a part out, repeat it, or end a reply twice. A
sentinel occurs nowhere else, so what comes back tells what the template does: each part must be there once, in order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from turnwise.errors import BadLine
from turnwise.types import Json, value_of_json

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
