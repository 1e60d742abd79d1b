"""What sentinels see of summaries: how long they are, and whether the agent asks again for what they had to keep."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping

from turnwise.features.sentinels import Played
from turnwise.types import Role, Turn


def summary_length(one: Played) -> float | None:
    """Return the mean number of tokens of a session's summaries; None without one."""
    lengths = [turn.token_ids.size for turn in one.turns if turn.role is Role.SUMMARY]
    return statistics.fmean(lengths) if lengths else None


def lost(one: Played) -> float | None:
    """Return 1.0 where a tool call after a summary repeats one before it, else 0.0; None without a call before one."""
    before: set[str] = set()
    summed_up: set[str] = set()
    for turn in one.turns:
        if turn.role is Role.SUMMARY:
            summed_up |= before
            continue
        calls = set(_calls(turn))
        if calls & summed_up:
            return 1.0
        before |= calls
    return 0.0 if summed_up else None


def _calls(turn: Turn) -> Iterator[str]:
    for call in turn.response.get("tool_calls") or ():
        function = call.get("function") or {}
        given = function.get("arguments")
        try:
            arguments = json.loads(given or "{}") if isinstance(given, str | None) else given
        except ValueError:
            arguments = given
        yield json.dumps([function.get("name"), arguments], sort_keys=True)


BOUNDS: Mapping[str, float] = {"summary_length": 1.0, "lost": 0.2}
MEASURES: Mapping[str, Callable[[Played], float | None]] = {"summary_length": summary_length, "lost": lost}
