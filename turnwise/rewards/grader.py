"""What a grader decided: a command that reads a session as JSON and answers by exit status and standard output.

A grader answers in one of three ways: nothing but its exit status (0 is a reward of 1, 1 is a reward of 0), one number,
or JSON Lines with a reward each. Every other answer is a failure and no reward: a broken grader must not teach the
policy anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import GraderFailed
from turnwise.processes.limited import run_limited
from turnwise.types import Json

FAILING_STATUS = 1
"""The exit status of a test that fails; a higher one says that the grader itself did not work."""
MAX_LINES = 10_000
_KEYS = ("value", "step", "turn_id", "name", "session_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Grade:
    """One reward: of the session, of one of its steps, or of one turn."""

    value: float
    step: int | None = None
    turn_id: str | None = None
    name: str | None = None
    session_id: str | None = None
    """Another session than the graded one: of its group, where a whole group is judged."""

    def line(self, session_id: str, source: str) -> Json:
        target: Json = {"turn_id": self.turn_id} if self.turn_id else {"session_id": self.session_id or session_id}
        if self.step is not None:
            target["step"] = self.step
        if self.name is not None:
            target["name"] = self.name
        return {**target, "value": self.value, "source": source}


def read_verdict(output: bytes, exit_status: int) -> list[Grade]:
    text = output.decode(errors="replace").strip()
    lines = [line for line in text.split("\n") if line.strip()]  # `splitlines` would cut strings at U+2028 too
    if lines and all(line.lstrip().startswith("{") for line in lines):
        _check_success(exit_status)
        return _from_lines(lines)
    number = _number(text)
    if number is not None:
        _check_success(exit_status)
        return [Grade(finite(number))]
    if exit_status > FAILING_STATUS:
        raise GraderFailed(f"it ended with exit status {exit_status}; 0 is a reward of 1, 1 is a reward of 0")
    return [Grade(1.0 - exit_status)]


def as_rewards(value: Any) -> list[Grade]:
    """Return what a Python function gave: None, a number or a truth value, one mapping, or several of these.

    Raises:
        GraderFailed: it is none of these.
    """
    if value is None:
        return []
    if isinstance(value, bool | int | float):
        return [Grade(finite(float(value)))]
    if isinstance(value, dict):
        return [_from_object(value)]
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [reward for each in value for reward in as_rewards(each)]
    raise GraderFailed(f"it returned {value!r}; return a number, a dict with `value`, a list of these, or None")


def finite(value: float) -> float:
    """Return the value.

    Raises:
        GraderFailed: it is NaN or infinite.
    """
    if not math.isfinite(value):
        raise GraderFailed(f"its reward is {value!r}; a reward is a finite number")
    return value


def _check_success(exit_status: int) -> None:
    if exit_status != 0:
        raise GraderFailed(f"it wrote a reward and then ended with exit status {exit_status}; end it with 0")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _from_lines(lines: list[str]) -> list[Grade]:
    if len(lines) > MAX_LINES:
        raise GraderFailed(f"it wrote {len(lines)} rewards; at most {MAX_LINES} are taken")
    rewards = []
    for line in lines:
        try:
            rewards.append(_from_object(json.loads(line)))
        except ValueError as error:
            raise GraderFailed(f"its line {line[:200]!r} is not JSON: {error}") from error
    return rewards


def _from_object(given: Json) -> Grade:
    strangers = [key for key in given if key not in _KEYS]
    if strangers:
        raise GraderFailed(f"a reward has no field {strangers[0]!r}; it has {', '.join(_KEYS)}")
    value = given.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraderFailed(f"a reward's `value` is {value!r}; give a number")
    return Grade(**{**given, "value": finite(float(value))})


@dataclass(frozen=True, slots=True)
class CommandGrader:
    """Runs one command for each graded session."""

    argv: Sequence[str]
    timeout_seconds: float = 60.0

    async def grade(self, document: Json, *, cwd: Path, environment: Mapping[str, str], log: Path) -> list[Grade]:
        ended = await run_limited(
            self.argv,
            cwd=cwd,
            environment=environment,
            log=log,
            timeout_seconds=self.timeout_seconds,
            stdin=json.dumps(document, ensure_ascii=False).encode(),
            capture=True,
        )
        if ended.timed_out:
            raise GraderFailed(f"{self.argv[0]!r} did not end within {self.timeout_seconds:g} s; its log is {log}")
        try:
            return read_verdict(ended.output, ended.exit_status)
        except GraderFailed as error:
            raise GraderFailed(f"{self.argv[0]!r} gave no reward: {error}; its log is {log}") from error
