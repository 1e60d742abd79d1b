"""A short conversation that a chat template continues like a long one.

What a template renders after a reply depends on the reply, on the messages after it, on the earlier calls that they
answer, and at most on the kinds of the other messages before it: whether there was thinking, a tool call, a later
question. So a long conversation is replaced by one with the same kinds of messages in the same neighbourhoods: long
texts lose their middle, and of a pattern that repeats, such as a call and its result, most repetitions are left out. A
text that contains one of the template's own marks, such as `</think>`, is kept whole. `ChatTemplate` checks at its
start that its template treats both alike, and replaces no conversation with a late result of an earlier call.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import orjson
from jinja2 import nodes, sandbox

from proxy.continuation.digests import canonical_content, tool_call_ids
from turnwise.types import Json

KEPT_HEAD, KEPT_TAIL = 4, 8
"""Messages at both ends that are always kept."""
MIN_MESSAGES = 24
"""Shorter conversations are kept as they are."""
MAX_TEXT = 256
"""Characters of a text that is kept whole."""
FORGET_AFTER = 16
"""New messages after which outlines that are no longer needed are forgotten."""
NEAR = 8
"""Messages before a needed one whose outlines are remembered: the next rendering may need them."""
OUTLINE_BYTES = 70
"""Memory of an outline beside its JSON, roughly."""
KEPT_TEXT = 96
"""Characters of a longer text that are kept at each end."""
MIN_MARK = 3
RESULT_ROLES = ("tool", "function")
"""A tuple, not a set, because a client may send an unhashable value as a role."""
NO_THINKING: Mapping[int, str] = {}
MAX_KINDS = 4096
"""Kinds that get a number; clients that invent roles make more, which are compared by their hash."""


class Mark(NamedTuple):
    """A text that the template looks for, and where a message has it: templates ask how a content begins or ends."""

    text: str
    is_first: bool
    is_last: bool


class Kind(NamedTuple):
    """What a template may distinguish messages by."""

    role: str
    num_calls: int
    """Up to 2."""
    has_thinking: bool
    is_empty: bool
    marks: tuple[Mark, ...]
    """The template's marks in its text."""


@dataclasses.dataclass(slots=True)
class Outlines:
    """The outlines of the first messages of a conversation: the kinds of all, and the messages that are still needed.

    The messages at both ends and around each change of the kinds are rendered, a small part of a long conversation. The
    others are forgotten, and made again from the conversation in the rare case that a rendering needs one.
    """

    kinds: list[int] = dataclasses.field(default_factory=list)
    """The number of each outlined message's `Kind`, which the `Outliner` assigns: numbers are compared faster."""
    messages: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Outlined messages as JSON, by position."""
    num_bytes: int = 0
    """Memory of `messages`."""
    num_at_last_forgetting: int = 0

    def copy(self) -> Outlines:
        """Return a copy; completing it does not change this one."""
        return dataclasses.replace(self, kinds=self.kinds[:], messages=self.messages.copy())

    def extend(self, outlined: Sequence[Json], kinds: Iterable[int]) -> None:
        """Add the next messages, which are outlined."""
        # Copies: the encoder's buffer is many times as long as its content.
        encoded = [memoryview(orjson.dumps(message)).tobytes() for message in outlined]
        self.messages.update(enumerate(encoded, len(self.kinds)))
        self.kinds += kinds
        self.num_bytes += sum(map(len, encoded)) + OUTLINE_BYTES * len(encoded)

    def forget(self, needed: Iterable[int], others: Collection[int], replied: int) -> None:
        """Forget outlines now and then, except those at or near the needed positions, at others, and after a reply."""
        if len(self.kinds) - self.num_at_last_forgetting < FORGET_AFTER:
            return
        self.num_at_last_forgetting = len(self.kinds)
        kept = {*others, *(at for position in needed for at in range(position - NEAR, position + 1))}
        forgotten = [position for position in self.messages if position < replied and position not in kept]
        freed = [self.messages.pop(position) for position in forgotten]
        self.num_bytes -= sum(map(len, freed)) + OUTLINE_BYTES * len(freed)


class Shortened(NamedTuple):
    """A conversation that is short before its reply."""

    messages: list[Json]
    replied: int
    """The reply's index."""
    kinds: tuple[int, ...]
    """The kinds of all its messages."""


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
        self._numbers: dict[Kind, int] = {}
        self._next_number = itertools.count()
        """Gives each number once, also where several threads number kinds."""

    def shortened(
        self,
        messages: Sequence[Json],
        replied: int,
        known: Outlines | None = None,
        thinking: Mapping[int, str] = NO_THINKING,
    ) -> Shortened:
        """Return a conversation that is short before the reply at index `replied`.

        Args:
            messages: the conversation.
            replied: the reply's index.
            known: outlines of the first messages, used again and completed up to the last message.
            thinking: what is put into replies that were sent without it, by position.
        """
        known = Outlines() if known is None else known
        outlined = list(map(self.outline, messages[len(known.kinds) :]))
        known.extend(outlined, map(self._kind, outlined))
        kinds, with_thinking = known.kinds[:replied], {}
        for position, text in thinking.items():
            if position < replied:
                message = {**self._message(position, messages, known), "reasoning": self._shorten(text)}
                kinds[position], with_thinking[position] = self._kind(message), message
        positions = kept_positions(kinds) if replied >= MIN_MESSAGES else range(replied)
        kept = [with_thinking.get(at) or self._message(at, messages, known) for at in positions]
        rest = restored(messages[replied:], thinking, first=replied)
        known.forget(positions, thinking.keys(), replied)
        return Shortened(
            [*kept, *rest],
            len(kept),
            (*(kinds[at] for at in positions), *map(self._kind, rest)),
        )

    def _message(self, position: int, messages: Sequence[Json], known: Outlines) -> Json:
        """Return an outlined message; one that was forgotten is outlined again."""
        known_json = known.messages.get(position)
        outlined: Json = self.outline(messages[position]) if known_json is None else orjson.loads(known_json)
        return outlined

    def outline_tools(self, tools: Any) -> Any:
        """Return the first and the last tool, without their parameters; tools with a mark are kept as they are."""
        if not self.shortens_tools or not isinstance(tools, list):
            return tools
        kept = tools if len(tools) <= 2 else [tools[0], tools[-1]]
        return [self._outline_tool(tool) for tool in kept]

    def _outline_tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or any(self._found(orjson.dumps(tool).decode())):
            return tool
        short = {field: self._shorten(value) for field, value in function.items()}
        parameters = function.get("parameters")
        if isinstance(parameters, dict) and parameters.get("type") == "object":
            short["parameters"] = {"type": "object", "properties": {}}
        return {**tool, "function": short}

    def outline(self, message: Json) -> Json:
        """Return a message whose long texts without marks have lost their middle."""
        short = {field: self._shorten(value) for field, value in message.items()}
        content = message.get("content")
        if isinstance(content, list):
            short["content"] = [self._outline_part(part) for part in content]
        if isinstance(message.get("tool_calls"), list):
            short["tool_calls"] = [_without_arguments(call) for call in message["tool_calls"]]
        return short

    def _kind(self, message: Json) -> int:
        """Return the number of an outlined message's kind; the hash of a kind beyond `MAX_KINDS`."""
        calls, thinking = message.get("tool_calls"), message.get("reasoning", message.get("reasoning_content"))
        content = str(canonical_content(message.get("content")))
        found = self._found(content + str(thinking or ""))
        bare, role = content.strip(), message.get("role")
        kind = Kind(
            role=role if isinstance(role, str) else repr(role),
            num_calls=min(len(calls), 2) if isinstance(calls, list) else 0,
            has_thinking=bool(thinking),
            is_empty=not content,
            marks=tuple(Mark(mark, bare.startswith(mark), bare.endswith(mark)) for mark in found),
        )
        number = self._numbers.get(kind)
        if number is None and len(self._numbers) < MAX_KINDS:
            number = self._numbers.setdefault(kind, next(self._next_number))
        return hash(kind) if number is None else number

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


def restored(messages: Sequence[Json], thinking: Mapping[int, str], *, first: int = 0) -> list[Json]:
    """Return messages with thinking in those that have some; `first` is the position of the first one."""
    return [
        {**message, "reasoning": thinking[position]} if position in thinking else message
        for position, message in enumerate(messages, first)
    ]


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
