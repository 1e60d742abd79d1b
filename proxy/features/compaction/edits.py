"""The edits of `context_management`: how they are read, when they apply, and what is left of a conversation.

An edit changes the prompt of one call. The client keeps its whole conversation and sends it again, so each call is
edited anew. A field that is not known here is refused: an edit that is half applied would be another one.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from proxy.features.compaction.texts import PROMPT
from turnwise.errors import InvalidRequest
from turnwise.types import Json

FIELD = "context_management"
CLEARED = "[The result of this tool call was cleared.]"
COMPACT_TOKENS = 150_000
CLEAR_TOKENS = 100_000
KEPT_TOOL_USES = 3
"""Anthropic's defaults."""
TOKENS, TOOL_USES, TURNS = "input_tokens", "tool_uses", "thinking_turns"


@dataclasses.dataclass(frozen=True, slots=True)
class Edit(abc.ABC):
    """One edit."""

    type: ClassVar[str]
    fields: ClassVar[frozenset[str]]

    @classmethod
    @abc.abstractmethod
    def read(cls, given: Json) -> Edit: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Compact(Edit):
    """Sums the conversation up once its prompt has this many tokens."""

    type = "compact_20260112"
    fields = frozenset({"trigger", "instructions", "pause_after_compaction"})
    threshold: float | None
    """None for most of the engine's context."""
    pauses: bool = False
    """Whether the reply is the summary alone."""
    prompt: str = PROMPT

    @classmethod
    def read(cls, given: Json) -> Compact:
        _, tokens = _amount(given, "trigger", (TOKENS,)) or (TOKENS, COMPACT_TOKENS)
        return cls(tokens, given.get("pause_after_compaction") is True, prompt_of(given))


@dataclasses.dataclass(frozen=True, slots=True)
class Clearing(Edit):
    """Removes a part of what older messages hold."""

    at: tuple[str, int] = (TOKENS, 0)
    """What the conversation has when it applies, and how much of that."""
    least_tokens: int = 0
    """It does not apply where it would remove fewer."""
    counted: ClassVar[str]
    """The field of the answer that says how much was cleared."""

    @abc.abstractmethod
    def cleared(self, messages: Sequence[Json]) -> tuple[list[Json], int]:
        """Return the messages that are left, and how much was cleared."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClearToolUses(Clearing):
    """Replaces the results of older tool calls, and empties their arguments where that is asked for."""

    type = "clear_tool_uses_20250919"
    fields = frozenset({"trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"})
    counted = "cleared_tool_uses"
    num_kept: int = KEPT_TOOL_USES
    excluded: frozenset[str] = frozenset()
    inputs: bool | frozenset[str] = False
    """Whether arguments are emptied too, or of which tools."""

    @classmethod
    def read(cls, given: Json) -> ClearToolUses:
        _, least = _amount(given, "clear_at_least", (TOKENS,)) or (TOKENS, 0)
        _, kept = _amount(given, "keep", (TOOL_USES,)) or (TOOL_USES, KEPT_TOOL_USES)
        inputs = given.get("clear_tool_inputs") or False
        return cls(
            _amount(given, "trigger", (TOKENS, TOOL_USES)) or (TOKENS, CLEAR_TOKENS),
            least,
            kept,
            _names(given, "exclude_tools"),
            inputs if isinstance(inputs, bool) else _names(given, "clear_tool_inputs"),
        )

    def cleared(self, messages: Sequence[Json]) -> tuple[list[Json], int]:
        names = {
            call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
        }
        results = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        older = results[: max(0, len(results) - self.num_kept)]
        chosen = {call_id for call_id in older if names.get(call_id) not in self.excluded}
        return [self._left(message, chosen) for message in messages], len(chosen)

    def _left(self, message: Json, chosen: set[str]) -> Json:
        if message["role"] == "tool" and message["tool_call_id"] in chosen:
            return {**message, "content": CLEARED}
        if self.inputs is False or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [self._call(call, chosen) for call in message["tool_calls"]]}

    def _call(self, call: Json, chosen: set[str]) -> Json:
        function = call["function"]
        if call["id"] not in chosen or (isinstance(self.inputs, frozenset) and function["name"] not in self.inputs):
            return call
        return {**call, "function": {**function, "arguments": "{}"}}


@dataclasses.dataclass(frozen=True, slots=True)
class ClearThinking(Clearing):
    """Removes the thinking of all replies but those since some of the newest messages of the user."""

    type = "clear_thinking_20251015"
    fields = frozenset({"keep"})
    counted = "cleared_thinking_turns"
    num_kept: float = 1

    @classmethod
    def read(cls, given: Json) -> ClearThinking:
        keep = given.get("keep")
        if keep in ("all", {"type": "all"}):
            return cls(num_kept=float("inf"))
        _, turns = _amount(given, "keep", (TURNS,)) or (TURNS, 1)
        return cls(num_kept=turns)

    def older(self, messages: Sequence[Json]) -> frozenset[int]:
        """Return the indices of the replies whose thinking is removed."""
        turns: list[list[int]] = [[]]
        for index, message in enumerate(messages):
            if message["role"] == "user":
                turns.append([])
            elif message["role"] == "assistant":
                turns[-1].append(index)
        replied = [turn for turn in turns if turn]
        kept = min(len(replied), self.num_kept)
        return frozenset(index for turn in replied[: len(replied) - int(kept)] for index in turn)

    def cleared(self, messages: Sequence[Json]) -> tuple[list[Json], int]:
        older, left, num_turns = self.older(messages), [], 0
        for index, message in enumerate(messages):
            has_thought = index in older and "reasoning" in message
            num_turns += has_thought
            left.append({name: message[name] for name in message if name != "reasoning"} if has_thought else message)
        return left, num_turns


KNOWN: Mapping[str, type[Edit]] = {kind.type: kind for kind in (ClearToolUses, ClearThinking, Compact)}


def read_edits(given: Any) -> tuple[Edit, ...]:
    """Return Anthropic's edits in their order.

    Raises:
        InvalidRequest: one is not known, or has a field or a value that is not.
    """
    if given is None:
        return ()
    edits = given.get("edits") or [] if isinstance(given, dict) and given.keys() <= {"edits"} else None
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise refused(f"is an object with a list `edits`, not {given!r:.80}")
    found = []
    for edit in edits:
        kind = KNOWN.get(edit.get("type") or "")
        if kind is None:
            raise refused(f"has the edit {edit.get('type')!r:.60}; {', '.join(KNOWN)} are served")
        if unknown := sorted(edit.keys() - kind.fields - {"type"}):
            raise refused(
                f"has the field {unknown[0]!r:.60} in {kind.type}; {', '.join(sorted(kind.fields))} are served"
            )
        found.append(kind.read(edit))
    return tuple(found)


def read_thresholds(given: Any) -> tuple[Compact, ...]:
    """Return OpenAI's entries, each of type `compaction`.

    Raises:
        InvalidRequest: one is of another type, or has a field or a value that is not known.
    """
    entries = given if isinstance(given, list) else [] if given is None else None
    if entries is None or not all(isinstance(entry, dict) for entry in entries):
        raise refused(f"is a list of objects, not {given!r:.80}")
    for entry in entries:
        at = entry.get("compact_threshold")
        if entry.get("type") != "compaction" or entry.keys() - {"type", "compact_threshold"}:
            raise refused(f"has the entry {entry!r:.80}; one of type `compaction` with `compact_threshold` is served")
        if at is not None and not _is_amount(at):
            raise refused(f"has the `compact_threshold` {at!r:.40}; it is a number of tokens")
    return tuple(Compact(entry.get("compact_threshold")) for entry in entries)


def prompt_of(given: Json) -> str:
    """Return the prompt that `instructions` replace, unless they are empty."""
    instructions = given.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise refused(f"has the `instructions` {instructions!r:.60}; they are a text")
    return (instructions or "").strip() or PROMPT


def refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"`{FIELD}` {why}", param=FIELD)


def _is_amount(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _amount(given: Json, field: str, kinds: tuple[str, ...]) -> tuple[str, int] | None:
    value = given.get(field)
    if value is None:
        return None
    if (
        not isinstance(value, dict)
        or value.keys() != {"type", "value"}
        or value["type"] not in kinds
        or not _is_amount(value["value"])
    ):
        raise refused(f"has the `{field}` {value!r:.80}; it is an object with `type` ({', '.join(kinds)}) and `value`")
    return value["type"], value["value"]


def _names(given: Json, field: str) -> frozenset[str]:
    names = given.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused(f"has the `{field}` {names!r:.80}; it is a list of names of tools")
    return frozenset(names)
