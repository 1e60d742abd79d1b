"""A session as one JSON document: what graders and judges read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.types import Json

_TURN_FIELDS = (
    *("turn_id", "parent_turn_id", "chain_id", "seq", "step", "model", "finish_reason", "outcome", "reason"),
    *("messages", "response", "rewards"),
)


def document(session: Json, turns: Sequence[Json], task: Json | None = None) -> Json:
    """Return a session, its turns with what each adds, and the whole conversation of each chain once.

    `session` and `turns` are as the API returns them; `task` is the line of the tasks file, where there is one.
    """
    last = {turn["chain_id"]: turn["turn_id"] for turn in turns}
    chains = [{"chain_id": chain_id, **conversation(turns, turn_id)} for chain_id, turn_id in last.items()]
    whole = {"session": session, "turns": [_short(turn) for turn in turns], "chains": chains}
    return whole if task is None else {**whole, "task": task}


def conversation(turns: Sequence[Json], turn_id: str) -> Json:
    by_id = {turn["turn_id"]: turn for turn in turns}
    line = []
    reached: str | None = turn_id
    while reached is not None:
        line.append(by_id[reached])
        reached = by_id[reached]["parent_turn_id"]
    messages = [message for turn in reversed(line) for message in (*turn["messages"], turn["response"])]
    return {"tools": line[-1]["tools"], "messages": messages}


def _short(turn: Json) -> Json:
    return {name: turn.get(name) for name in _TURN_FIELDS}


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""
