"""A session as one JSON document: what graders and judges read."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.types import Json

_TURN_FIELDS = ("turn_id", "chain_id", "seq", "step", "model", "finish_reason", "outcome", "reason", "response")


def document(session: Json, turns: Sequence[Json], task: Json | None = None) -> Json:
    """Return a session, its turns without their prompts, and the whole conversation of each chain once.

    Args:
        session: As `GET /v1/sessions/{id}` returns it.
        turns: As `GET /v1/sessions/{id}/turns` returns them, in order.
        task: The line of the tasks file, where there is one.
    """
    last: dict[str, Json] = {}
    for turn in turns:
        last[turn["chain_id"]] = turn
    chains = [
        {"chain_id": chain_id, "tools": turn["tools"], "messages": [*turn["messages"], turn["response"]]}
        for chain_id, turn in last.items()
    ]
    told = {"session": session, "turns": [_short(turn) for turn in turns], "chains": chains}
    return told if task is None else {**told, "task": task}


def _short(turn: Json) -> Json:
    return {name: turn.get(name) for name in (*_TURN_FIELDS, "rewards")}
