"""Finished runs: a ledger that plays none of them twice, a progress line while they run, and a table at the end.

A line of JSON for each run is appended and synced.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from turnwise.errors import SettingsError
from turnwise.files import append_lines, lock, read_objects, write_whole
from turnwise.types import Json

Key = tuple[int, str, str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One finished run."""

    session_id: str
    task_id: str
    run: int
    pass_index: int
    split: str
    reward: float | None
    termination_reason: str
    num_turns: int
    seconds: float
    error: str | None = None

    @property
    def key(self) -> Key:
        return (self.pass_index, self.split, self.task_id, self.run)


class Results:
    """The results of one directory; only one process at a time may write them."""

    def __init__(self, directory: Path, plan: Json) -> None:
        """Open the ledger; `plan` has the settings that must be equal for all results of the directory.

        Raises:
            SettingsError: another process uses the directory, or it holds results of another plan.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        try:
            self._lock = lock(directory / "lock")
        except OSError as error:
            raise SettingsError(f"another `turnwise run` uses {str(directory)!r}; give another --out") from error
        self.is_resumed = (directory / "plan.json").exists()
        self._path = directory / "results.jsonl"
        self.finished = {result.key: result for result in read_results(self._path)}
        try:
            self.name = self._identify(plan)
        except SettingsError:
            self._lock.close()
            raise
        append_lines(self._path, [])  # the file exists also before the first run has finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def add(self, result: RunResult) -> None:
        append_lines(self._path, [json.dumps(dataclasses.asdict(result), ensure_ascii=False)], is_durable=True)
        self.finished[result.key] = result

    def _identify(self, plan: Json) -> str:
        """Return the name of these results, which the first start chooses, or another plan if no run is finished."""
        path = self.directory / "plan.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        differing = [name for name, value in plan.items() if stored.get(name) != value]
        if not stored or (differing and not self.finished):
            stored = {"name": f"run-{uuid.uuid4().hex[:8]}", **plan}
            write_whole(path, json.dumps(stored, ensure_ascii=False))
        for name, value in plan.items():
            if stored.get(name) != value:
                raise SettingsError(
                    f"{str(self.directory)!r} holds results with {name} {stored.get(name)!r}, not {value!r}; "
                    "give another --out"
                )
        return str(stored["name"])


def read_results(path: Path) -> list[RunResult]:
    return [RunResult(**fields) for fields in read_objects(path)]


MAX_TABLE_TASKS = 40
SECONDS_BETWEEN_LINES = 10.0
COLUMNS = ("task_id", "runs", "reward_mean", "reward_min", "reward_max", "turns_mean", "seconds_mean", "failed")


class RolloutProgress:
    """Counts finished runs and prints a line about them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._started = time.monotonic()
        self._printed_at = 0.0
        self.results: list[RunResult] = []
        self.num_planned: int | None = None
        """Runs of this pass; None where there is no end."""
        self.num_missing = 0
        """Runs that were not played because an interrupt stopped the others."""

    def add(self, result: RunResult) -> None:
        """Count a run and print the line when it is due."""
        self.results.append(result)
        now = time.monotonic()
        is_terminal = self._stream.isatty()
        if is_terminal or now - self._printed_at >= SECONDS_BETWEEN_LINES or len(self.results) == self.num_planned:
            self._printed_at = now
            self._print(self._line(), same_line=is_terminal)

    def _line(self) -> str:
        totals = summary(self.results)
        total = "" if self.num_planned is None else f"/{self.num_planned}"
        reward = "no reward yet" if totals["reward_mean"] is None else f"reward {totals['reward_mean']:.3f}"
        problems = ", ".join(
            f"{totals[name]} {label}"
            for name, label in (
                ("num_timeouts", "timed out"),
                ("num_failed", "failed"),
                ("num_without_calls", "without a model call"),
                ("num_ungraded", "without a reward"),
                ("num_uniform_groups", "groups of equal rewards"),
            )
            if totals[name]
        )
        seconds = time.monotonic() - self._started
        return f"{len(self.results)}{total} runs  {reward}  {seconds:.0f} s" + (f"  ({problems})" if problems else "")

    def message(self, text: str) -> None:
        self._print(text, same_line=False)

    def _print(self, text: str, *, same_line: bool) -> None:
        clear = "\r\x1b[K" if self._stream.isatty() else ""
        self._stream.write(clear + text + ("" if same_line else "\n"))
        self._stream.flush()


def summary(results: Sequence[RunResult]) -> dict[str, Any]:
    rewards = [result.reward for result in results if result.reward is not None]
    return {
        "num_runs": len(results),
        "num_rewarded": len(rewards),
        "reward_mean": _mean(rewards),
        "num_timeouts": sum(result.termination_reason == "timeout" for result in results),
        "num_failed": sum(is_failed(result) for result in results),
        "num_without_calls": sum(result.num_turns == 0 for result in results),
        "num_uniform_groups": num_uniform_groups(results),
        "num_ungraded": sum(result.reward is None for result in results),
        "num_turns": sum(result.num_turns for result in results),
        "seconds_mean": _mean([result.seconds for result in results]),
    }


def num_uniform_groups(results: Sequence[RunResult]) -> int:
    """Return how many groups of training runs have one reward for all runs: they teach nothing."""
    groups: dict[tuple[int, str], list[float | None]] = defaultdict(list)
    for result in results:
        if result.split == "train":
            groups[result.pass_index, result.task_id].append(result.reward)
    return sum(len(rewards) > 1 and len(set(rewards)) == 1 and rewards[0] is not None for rewards in groups.values())


def by_task(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    groups: dict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        groups[result.task_id].append(result)
    return [{"task_id": task_id, **_row(runs)} for task_id, runs in groups.items()]


def table(results: Sequence[RunResult]) -> list[str]:
    """Return the table as lines of text: one per task, up to the maximum, and one for all tasks."""
    rows = by_task(results)
    shown = rows if len(rows) <= MAX_TABLE_TASKS else []
    total = {"task_id": f"all {len(rows)} tasks", **_row(results)}
    cells = [list(COLUMNS)] + [[_cell(row[name]) for name in COLUMNS] for row in (*shown, total)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def is_failed(result: RunResult) -> bool:
    return result.termination_reason not in {"exit_status_0", "timeout"}


def _row(runs: Sequence[RunResult]) -> dict[str, Any]:
    rewards = [run.reward for run in runs if run.reward is not None]
    return {
        "runs": len(runs),
        "reward_mean": _mean(rewards),
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "turns_mean": _mean([run.num_turns for run in runs]),
        "seconds_mean": _mean([run.seconds for run in runs]),
        "failed": sum(is_failed(run) or run.termination_reason == "timeout" for run in runs),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
