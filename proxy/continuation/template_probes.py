"""Conversations that show what a chat template prints, and whether it continues long ones as their outlines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from proxy.continuation.digests import CALL_IDS, NAME
from proxy.continuation.outline import Continued
from turnwise.types import Json

PROBE_VALUES = {NAME: "probename", CALL_IDS: "probecall"}
OTHER_VALUE = "otherwise"
"""Nine letters, because some templates refuse other ids of tool calls."""
_NAME, _CALL_ID = PROBE_VALUES[NAME], PROBE_VALUES[CALL_IDS]
PROBES: Sequence[list[Json]] = (
    [
        {"role": "user", "content": "a", "name": _NAME},
        {"role": "assistant", "content": "b", "name": _NAME},
        {"role": "user", "content": "c", "name": _NAME},
    ],
    [{"role": "system", "content": "a", "name": _NAME}, {"role": "user", "content": "b"}],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": "b"},
        {"role": "assistant", "content": "c"},
    ],
)
"""Conversations with names and ids of calls; a template may refuse some of them."""


def with_other_value(probe: list[Json], field: str) -> list[Json]:
    """Return the same conversation with another name, or with another id of its call."""
    other: list[Json] = json.loads(json.dumps(probe).replace(PROBE_VALUES[field], OTHER_VALUE))
    return other


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


def with_other_text(probe: Continued) -> Continued:
    """Return a conversation with the same kinds of messages: with other texts, functions and ids of calls."""
    text = json.dumps([probe.messages, probe.reasoning]).replace(LONG_TEXT, OTHER_TEXT)
    messages, reasoning = json.loads(text.replace(CALLED, OTHER_CALLED).replace("call_", "made_"))
    return probe._replace(messages=messages, reasoning=reasoning)


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
"""What stands before the reply."""
REPLIES: Sequence[tuple[Json, list[Json]]] = (
    (ANSWER, [USER]),
    (THOUGHT, [USER]),
    (_call(1), _results(1)),
    (_call(2, reasoning=LONG_TEXT), [*_results(2, name=CALLED), USER]),
)
"""Replies, and what follows them."""


def long_probes(end_token: int) -> Iterator[Continued]:
    """Yield the probes; `end_token` is what ends a reply that was not cut off."""
    for before, (reply, after), keep_thinking in itertools.product(BEFORE, REPLIES, (False, True)):
        has_calls = any(message.get("tool_calls") for message in [*before, reply])
        yield Continued(
            messages=[*before, reply, *after],
            replied=len(before),
            last_token=end_token,
            reasoning=reply.get("reasoning", ""),
            tools=TOOLS if has_calls else None,
            arguments={},
            keep_thinking=keep_thinking,
        )
