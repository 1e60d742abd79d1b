"""The ledger of finished runs: one line of JSON each, appended and synced, so that no finished run is played twice."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Self

from turnwise.errors import SettingsError
from turnwise.files import append_lines, lock, read_objects, write_whole
from turnwise.types import Json

Key = tuple[int, str, str, int]
"""Pass, split, task and run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One finished run."""

    session_id: str
    task_id: str
    run: int
    pass_index: int
    split: str
    reward: float | None
    """The session's reward; None if it has none."""
    termination_reason: str
    num_turns: int
    seconds: float
    error: str | None = None
    """The error of the run or of its grader, as a sentence."""

    @property
    def key(self) -> Key:
        """The key of the run."""
        return (self.pass_index, self.split, self.task_id, self.run)


class Results:
    """The results of one directory; only one process at a time may write them."""

    def __init__(self, directory: Path, plan: Json) -> None:
        """Open the ledger.

        Args:
            directory: The directory of the results.
            plan: The settings that must be equal for all results of the directory.

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
        """Whether an earlier start used the directory."""
        self._path = directory / "results.jsonl"
        self.finished = {result.key: result for result in read_results(self._path)}
        try:
            self.name = self._identify(plan)
            """Prefix of every session id of this directory."""
        except SettingsError:
            self._lock.close()
            raise
        append_lines(self._path, [])  # the file exists also before the first run has finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def add(self, result: RunResult) -> None:
        """Record a finished run durably."""
        append_lines(self._path, [json.dumps(dataclasses.asdict(result), ensure_ascii=False)], is_durable=True)
        self.finished[result.key] = result

    def _identify(self, plan: Json) -> str:
        """Return the name of these results. The first start chooses it, and so does another plan if no run is finished.

        Raises:
            SettingsError: the directory holds results of another plan.
        """
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
    """Return the results of a ledger."""
    return [RunResult(**fields) for fields in read_objects(path)]
