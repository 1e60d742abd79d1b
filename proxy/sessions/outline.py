"""A short conversation that a chat template continues like a long one.

What a template renders after a reply depends on the reply, on the messages after it, on the earlier calls that they
answer, and at most on the kinds of the other messages before it: whether there was thinking, a tool call, a later
question. So a long conversation is replaced by one with the same kinds of messages in the same neighbourhoods: long
texts lose their middle, and of a pattern that repeats, such as a call and its result, most repetitions are left out. A
message whose text has one of the template's own marks, such as `</think>`, is kept whole. `ChatTemplate` checks at its
start that its template treats both alike, and replaces no conversation with a late result of an earlier call. The kinds
of the messages of earlier calls are kept, so a call reads its new messages and the few old ones that stay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes, sandbox

from proxy.sessions.digests import canonical_content, tool_call_ids
from turnwise.json_text import dumps
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
RESULT_ROLES = ("tool", "function")
"""A tuple, not a set, because a client may send an unhashable value as a role."""
NO_THINKING: Mapping[int, str] = {}


class Continued(NamedTuple):
    """A conversation with a sampled reply, after which the next one is sampled."""

    messages: Sequence[Json]
    """The whole conversation."""
    replied: int
    """Index of the reply in it."""
    last_token: int
    """The last sampled token: one that ends a turn, or another where a length or a stop string cut the reply off."""
    reasoning: str
    """The thinking that was sampled; empty without any."""
    tools: Any
    arguments: Json
    """The template's own arguments."""
    keep_thinking: bool
    """Whether to stay on the chain although the template drops earlier thinking."""


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

    def __init__(self, marks: Sequence[str], *, shortens_tools: bool = False) -> None:
        self._marks = marks
        self.shortens_tools = shortens_tools
        """Whether long lists of tools are shortened too."""

    def shortened(
        self, continued: Continued, known: list[int], thinking: Mapping[int, str]
    ) -> tuple[Continued, tuple[int, ...]]:
        """Return a conversation that is short before its reply, and the kinds of all its messages.

        Args:
            continued: the whole conversation.
            known: kinds of the first messages, completed up to the last message.
            thinking: what is put into replies that were sent without it, by position.
        """
        replied = continued.replied
        known += map(self.kind, continued.messages[len(known) :])
        messages, kinds = restored(continued.messages, thinking), known[:]
        for position in thinking:
            kinds[position] = self.kind(messages[position])
        positions = kept_positions(kinds[:replied]) if replied >= MIN_MESSAGES else range(replied)
        kept = [outlined(messages[at], has_marks=kinds[at] < 0) for at in positions]
        short = continued._replace(
            messages=[*kept, *messages[replied:]], replied=len(kept), tools=self.outline_tools(continued.tools)
        )
        return short, (*(kinds[at] for at in positions), *kinds[replied:])

    def outline_tools(self, tools: Any) -> Any:
        """Return the first and the last tool, without their parameters; tools with a mark are kept as they are."""
        if not self.shortens_tools or not isinstance(tools, list):
            return tools
        kept = tools if len(tools) <= 2 else [tools[0], tools[-1]]
        return [self._outline_tool(tool) for tool in kept]

    def _outline_tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or any(self._found(dumps(tool).decode())):
            return tool
        short = {field: _cut(value) for field, value in function.items()}
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and parameters.get("type") == "object":
            short["parameters"] = {"type": "object", "properties": {}}
        return {**tool, "function": short}

    def kind(self, message: Json) -> int:
        """Return the hash of what a template may distinguish messages by; negative for a text with marks.

        That is the role, the number of calls up to two, whether there is thinking and any content, and the template's
        marks in the text. Of a mark it counts whether the content begins or ends with it: templates ask for that.
        """
        calls, thinking = message.get("tool_calls"), message.get("reasoning", message.get("reasoning_content"))
        content = str(canonical_content(message.get("content")))
        bare, role = content.strip(), message.get("role")
        found = self._found(content + str(thinking or ""))
        marks = [(mark, bare.startswith(mark), bare.endswith(mark)) for mark in found]
        num_calls = min(len(calls), 2) if isinstance(calls, list) else 0
        role = role if isinstance(role, str) else repr(role)
        number = abs(hash((role, num_calls, bool(thinking), not content, *marks)))
        return -1 - number if marks else number

    def _found(self, text: str) -> Iterable[str]:
        return (mark for mark in self._marks if mark in text)


def answers_earlier_call(messages: Sequence[Json]) -> bool:
    """Return whether a result among these messages answers a call before them, or does not say which call it answers.

    Args:
        messages: a reply and what follows it.
    """
    called: frozenset[str] = frozenset()
    for message in messages:
        answered = message.get("tool_call_id")
        if (answered is not None or message.get("role") in RESULT_ROLES) and answered not in [*called]:
            return True
        called |= tool_call_ids(message)
    return False


def restored(messages: Sequence[Json], thinking: Mapping[int, str]) -> list[Json]:
    """Return messages with thinking in those that have some."""
    whole = list(messages)
    for position, text in thinking.items():
        whole[position] = {**messages[position], "reasoning": text}
    return whole


def outlined(message: Json, *, has_marks: bool) -> Json:
    """Return a message without long arguments; where it has no marks, its long texts have lost their middle."""
    short = message.copy() if has_marks else {field: _cut(value) for field, value in message.items()}
    if isinstance(message.get("content"), list) and not has_marks:
        short["content"] = [_outlined_part(part) for part in message["content"]]
    if isinstance(message.get("tool_calls"), list):
        short["tool_calls"] = [_without_arguments(call) for call in message["tool_calls"]]
    return short


def _outlined_part(part: Any) -> Any:
    return {field: _cut(value) for field, value in part.items()} if isinstance(part, dict) else _cut(part)


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > MAX_TEXT
    return f"{value[:KEPT_TEXT]} {value[-KEPT_TEXT:]}" if is_long else value


def _without_arguments(call: Any) -> Any:
    """Return a tool call; long arguments become an empty object."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str) or len(arguments) <= MAX_TEXT:
        return call
    return {**call, "function": {**call["function"], "arguments": "{}"}}


def kept_positions(kinds: Sequence[Hashable]) -> list[int]:
    """Return the positions of the messages to keep.

    Both ends are kept, and the first and the last message of each kind. Between two of these, the longest block is left
    out after which the same two kinds follow each other as at its start. Blocks have an even length, because some
    templates check that users and assistants alternate.
    """
    last = len(kinds)
    backwards = kinds[::-1]
    first_and_last = [at for kind in set(kinds) for at in (kinds.index(kind), last - 1 - backwards.index(kind))]
    pinned = {*range(last - KEPT_TAIL, last), *first_and_last}
    before = KEPT_HEAD - 1
    positions = [*range(before)]
    for end in [*sorted(position for position in pinned if position >= KEPT_HEAD), last]:
        begin, resume = _longest_block(kinds, before, end)
        positions += [*range(before, begin), *range(resume, end)]
        before = end
    return positions


def _longest_block(kinds: Sequence[Hashable], start: int, end: int) -> tuple[int, int]:
    """Return the longest block between `start` and `end` that can be left out; an empty one at the end if none can."""
    last = min(end, len(kinds) - 1)
    for begin in range(start + 1, min(start + 4, end)):
        before, after = kinds[begin - 1], kinds[begin]
        for resume in range(last - (last - begin) % 2, begin + 1, -2):
            if kinds[resume] == after and kinds[resume - 1] == before:
                return begin, resume
    return end, end
