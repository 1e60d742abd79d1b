"""The reward source `next_state`: what came back after a turn judges the turn.

Three rules, the first that fits decides: a tool that reports an error, a turn that repeats an earlier tool call
exactly, and a user who corrects or thanks. A turn that no rule fits gets no reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from turnwise.rewards.verdict import Reward
from turnwise.types import Json

TOOL_ERROR = -1.0
REPEATED_CALL = -0.5
CORRECTION = -1.0
THANKS = 1.0

_ERROR_TEXT = re.compile(
    r"^\s*(?:Traceback \(most recent call last\)|(?:[A-Za-z_.]*Error|Exception|error|fatal)\b\s*:)"
    r"|<returncode>(?!0<)-?\d+</returncode>|\bexit (?:code|status):? [1-9]|command not found",
    re.MULTILINE,
)
_ERROR_KEYS = ("error", "is_error", "isError", "exception")
_CORRECTION = re.compile(
    r"^\s*(?:no\b(?! problem| worries)|wrong\b|that(?:'s| is) (?:wrong|not)|not what i\b|i (?:said|asked|meant)\b"
    r"|stop\b|undo\b)"
    r"|\b(?:does(?:n't| not) work|still (?:fails|broken|wrong)|you (?:forgot|missed|broke))\b",
    re.IGNORECASE,
)
_THANKS = re.compile(
    r"^\s*(?:thanks|thank you|perfect|great|excellent|that works|works now|well done)\b", re.IGNORECASE
)


def judge_turns(document: Json) -> list[Reward]:
    """Return a reward for each turn of a session that a rule fits."""
    following = {turn["parent_turn_id"]: turn for turn in document["turns"] if turn["parent_turn_id"] is not None}
    made: dict[str, set[str]] = {}
    rewards = []
    for turn in document["turns"]:
        earlier = made.setdefault(turn["chain_id"], set())
        calls = set(_calls(turn["response"]))
        after = following.get(turn["turn_id"])
        value = _judge(after["messages"] if after else [], repeats=bool(calls & earlier))
        earlier |= calls
        if value is not None:
            rewards.append(Reward(value, turn_id=turn["turn_id"]))
    return rewards


def _judge(messages: Sequence[Json], *, repeats: bool) -> float | None:
    """Return what a turn is worth by the messages that came after it; None where no rule fits."""
    if any(message.get("role") == "tool" and is_error(text_of(message.get("content"))) for message in messages):
        return TOOL_ERROR
    if repeats:
        return REPEATED_CALL
    said = [text_of(message.get("content")) for message in messages if message.get("role") == "user"]
    if any(is_error(text) for text in said if text.lstrip().startswith("<returncode>")):
        return TOOL_ERROR
    if any(_CORRECTION.search(text) for text in said):
        return CORRECTION
    return THANKS if any(_THANKS.search(text) for text in said) else None


def is_error(text: str) -> bool:
    """Tell whether a tool's result reports an error."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return _ERROR_TEXT.search(text) is not None
    return isinstance(value, dict) and any(value.get(key) for key in _ERROR_KEYS)


def text_of(content: Any) -> str:
    """Return a message's content as text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def _calls(response: Json) -> list[str]:
    """Return the tool calls of a reply, each as one text, equal for equal calls."""
    calls = [call.get("function") or {} for call in response.get("tool_calls") or []]
    return [f"{call.get('name')} {_ordered(call.get('arguments'))}" for call in calls]


def _ordered(arguments: Any) -> str:
    try:
        return json.dumps(json.loads(arguments) if isinstance(arguments, str) else arguments, sort_keys=True)
    except ValueError:
        return str(arguments)
