"""A short conversation that a chat template continues like a long one.

What a template renders after a reply depends on the reply, on the messages after it, and at most on the kinds of the
messages before it: whether there was thinking, a tool call, a later question. So a long conversation is replaced by one
with the same kinds of messages in the same neighbourhoods: long texts lose their middle, and of a pattern that repeats,
such as a call and its result, most repetitions are left out. A text that contains one of the template's own marks, such
as `</think>`, is kept whole. `ChatTemplate` checks at its start that its template treats both alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes, sandbox

from turnwise.types import Json

KEPT_HEAD, KEPT_TAIL = 4, 8
"""Messages at both ends that are always kept."""
MIN_MESSAGES = 24
"""Shorter conversations are kept as they are."""
MAX_TEXT = 256
"""Characters of a text that is kept whole."""
KEPT_TEXT = 96
"""Characters of a longer text that are kept at each end."""
MIN_MARK = 3


class Kind(NamedTuple):
    """What a template may distinguish messages by."""

    role: Any
    num_calls: int
    """Up to 2."""
    has_thinking: bool
    is_empty: bool
    marks: tuple[str, ...]
    """The template's marks in its text."""


class Outline(NamedTuple):
    """A message and its short form."""

    source: Json
    message: Json
    kind: Kind


def marks_of(source: str) -> tuple[str, ...] | None:
    """Return the texts that a template may look for in messages; None where the template cannot be parsed.

    Names such as `tool_calls` are no marks: they are looked for among a message's fields.
    """
    environment = sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    try:
        parsed = environment.parse(source)
    except jinja2.TemplateSyntaxError:
        return None
    texts = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
    return tuple(sorted(text for text in map(str.strip, texts) if len(text) >= MIN_MARK and not text.isidentifier()))


class Outliner:
    """Shortens conversations for one template."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = marks

    def shortened(
        self, messages: Sequence[Json], replied: int, known: list[Outline] | None = None
    ) -> tuple[list[Json], int]:
        """Return a conversation that is short before the reply at index `replied`, and the reply's index in it.

        Args:
            messages: the conversation.
            replied: the reply's index.
            known: outlines of the same messages, used again and completed.
        """
        outlines = [] if known is None else known
        del outlines[replied:]
        for position, message in enumerate(messages[:replied]):
            if position == len(outlines):
                outlines.append(self._outlined(message))
            elif outlines[position].source is not message:
                outlines[position] = self._outlined(message)
        kept = outlines
        if replied >= MIN_MESSAGES:
            kept = [outlines[position] for position in kept_positions([outline.kind for outline in outlines])]
        return [*(outline.message for outline in kept), *messages[replied:]], len(kept)

    def _outlined(self, message: Json) -> Outline:
        short = self.outline(message)
        return Outline(message, short, self.kind(short))

    def outline(self, message: Json) -> Json:
        """Return a message whose long texts without marks have lost their middle."""
        short = {field: self._shorten(value) for field, value in message.items()}
        content = message.get("content")
        if isinstance(content, list):
            short["content"] = [self._outline_part(part) for part in content]
        if isinstance(message.get("tool_calls"), list):
            short["tool_calls"] = [_without_arguments(call) for call in message["tool_calls"]]
        return short

    def kind(self, message: Json) -> Kind:
        """Return the kind of an outlined message."""
        calls, thinking = message.get("tool_calls"), message.get("reasoning", message.get("reasoning_content"))
        text = str(message.get("content") or "") + str(thinking or "")
        return Kind(
            role=message.get("role"),
            num_calls=min(len(calls), 2) if isinstance(calls, list) else 0,
            has_thinking=bool(thinking),
            is_empty=not message.get("content"),
            marks=tuple(self._found(text)),
        )

    def _outline_part(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return self._shorten(part)
        return {field: self._shorten(value) for field, value in part.items()}

    def _shorten(self, value: Any) -> Any:
        if not isinstance(value, str) or len(value) <= MAX_TEXT or any(self._found(value)):
            return value
        return f"{value[:KEPT_TEXT]} {value[-KEPT_TEXT:]}"

    def _found(self, text: str) -> Iterable[str]:
        return (mark for mark in self._marks if mark in text)


def _without_arguments(call: Any) -> Any:
    """Return a tool call; long arguments become an empty object."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str) or len(arguments) <= MAX_TEXT:
        return call
    return {**call, "function": {**call["function"], "arguments": "{}"}}


def kept_positions(kinds: Sequence[Kind]) -> list[int]:
    """Return the positions of the messages to keep.

    Both ends are kept, and the first and the last message of each kind. Between two of these, the longest block is left
    out after which the same two kinds follow each other as at its start. Blocks have an even length, because some
    templates check that users and assistants alternate.
    """
    last = len(kinds)
    first_of: dict[Kind, int] = {}
    last_of: dict[Kind, int] = {}
    for position, kind in enumerate(kinds):
        first_of.setdefault(kind, position)
        last_of[kind] = position
    pinned = {*range(last - KEPT_TAIL, last), *first_of.values(), *last_of.values()}
    before = KEPT_HEAD - 1
    positions = [*range(before)]
    for end in [*sorted(position for position in pinned if position >= KEPT_HEAD), last]:
        begin, resume = _longest_block(kinds, before, end)
        positions += [*range(before, begin), *range(resume, end)]
        before = end
    return positions


def _longest_block(kinds: Sequence[Kind], start: int, end: int) -> tuple[int, int]:
    """Return the longest block between `start` and `end` that can be left out; an empty one at the end if none can."""
    for begin in range(start + 1, min(start + 4, end)):
        for resume in range(min(end, len(kinds) - 1), begin + 1, -1):
            is_alike = kinds[begin - 1 : begin + 1] == kinds[resume - 1 : resume + 1]
            if is_alike and not (resume - begin) % 2:
                return begin, resume
    return end, end
