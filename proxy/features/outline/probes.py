"""Long conversations that show whether a chat template continues them as their outlines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from turnwise.types import Json

REPEATED = 12
"""Repetitions of a pattern: enough for most of them to be left out of the outline."""
LONG_TEXT = "Some text that is long enough to lose its middle in the outline. " * 8
OTHER_TEXT = "Words of another length, none of which the first text has. " * 6
CALLED, OTHER_CALLED = "look_up", "write_down"
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": LONG_TEXT,
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
    for name in (CALLED, OTHER_CALLED, "send_off")
]
SYSTEM: Json = {"role": "system", "content": LONG_TEXT}
USER: Json = {"role": "user", "content": LONG_TEXT}
ANSWER: Json = {"role": "assistant", "content": LONG_TEXT}
THOUGHT: Json = {**ANSWER, "reasoning": LONG_TEXT}
EMBEDDED_THOUGHT: Json = {"role": "assistant", "content": f"<think>\n{LONG_TEXT}\n</think>\n\n{LONG_TEXT}"}


def with_other_text(messages: Sequence[Json]) -> list[Json]:
    """Return a conversation with the same kinds of messages: with other texts, functions and ids of calls."""
    text = json.dumps(messages).replace(LONG_TEXT, OTHER_TEXT)
    found: list[Json] = json.loads(text.replace(CALLED, OTHER_CALLED).replace("call_", "made_"))
    return found


def _call(number: int, content: str = "", *, name: str = CALLED, first: int = 0, **fields: Any) -> Json:
    """Return a reply with calls; their ids have nine characters, because some templates refuse others."""
    arguments = json.dumps({"name": LONG_TEXT})
    calls = [
        {"id": f"call_{each:04}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for each in range(first, first + number)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


def _results(number: int, *, first: int = 0, **fields: Any) -> list[Json]:
    return [
        {"role": "tool", "tool_call_id": f"call_{each:04}", "content": LONG_TEXT, **fields}
        for each in range(first, first + number)
    ]


WORK = [_call(1), *_results(1, name=CALLED)]
OTHER_WORK = [_call(1, first=9), *_results(1, first=9)]
SAME_ID = [_call(1, name="send_off"), *_results(1)]
"""Another function with the id of a later call, which a template may take for the later one."""
BEFORE: Sequence[list[Json]] = (
    [SYSTEM, USER, *[ANSWER, USER] * REPEATED],
    [USER, *[ANSWER, USER] * REPEATED],
    [SYSTEM, USER, *[THOUGHT, USER] * REPEATED],
    [USER, *[EMBEDDED_THOUGHT, USER] * REPEATED],
    [SYSTEM, USER, *WORK * REPEATED],
    [USER, *[_call(1, reasoning=LONG_TEXT), *_results(1, name=CALLED)] * REPEATED],
    [SYSTEM, USER, *[_call(2, LONG_TEXT), *_results(2, name=CALLED)] * REPEATED],
    [SYSTEM, USER, *OTHER_WORK * REPEATED, *SAME_ID, *OTHER_WORK * REPEATED],
    [SYSTEM, USER, *WORK * REPEATED, ANSWER, USER, *WORK * REPEATED],
    [SYSTEM, USER, *WORK * REPEATED, THOUGHT, USER, *[ANSWER, USER] * REPEATED],
)
REPLIES: Sequence[tuple[Json, list[Json]]] = (
    (ANSWER, [USER]),
    (THOUGHT, [USER]),
    (_call(1), _results(1)),
    (_call(2, reasoning=LONG_TEXT), [*_results(2, name=CALLED), USER]),
)
"""Replies, and what follows them."""


def long_conversations() -> Iterator[tuple[list[Json], int, list[Json] | None]]:
    """Yield conversations that are long before a reply: the messages, the position of the reply, and the tools."""
    for before, (reply, after) in itertools.product(BEFORE, REPLIES):
        has_calls = any(message.get("tool_calls") for message in [*before, reply])
        yield [*before, reply, *after], len(before), TOOLS if has_calls else None
