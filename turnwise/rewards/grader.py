"""How a grading command is asked and read: a session as JSON; exit status, one number, or lines with rewards.

A grader answers in one of three ways: nothing but its exit status (0 is a reward of 1, 1 is a reward of 0), one number,
or JSON Lines with a reward each. Every other answer is a failure and no reward: a broken grader must not teach the
policy anything, and a number that nobody reads must not become a success.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import MALFORMED, GraderFailed
from turnwise.processes.limited import run_limited
from turnwise.types import Json, text_of

FAILING_STATUS = 1
"""The exit status of a test that fails; a higher one says that the grader itself did not work."""
MAX_LINES = 1_000
_KEYS = ("value", "step", "turn_id", "name", "session_id")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""A number as JSON writes it."""
_LIKE_A_NUMBER = re.compile(
    r"[-+]?(0x[0-9a-f]+|\d[\d_' ]*([.,]\d*)?|[.,]\d+)(e[-+]?\d+)?( ?%| ?/ ?\d+)?", re.IGNORECASE
)
_WORDS = frozenset({"true", "false", "null", "none", "nan", "inf", "infinity"})
"""What programs print for a verdict, and what is no number."""


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
    if _NUMBER.fullmatch(text):
        _check_success(exit_status)
        return [Grade(finite(float(text)))]
    for line in lines:
        if _is_unread(line.strip()):
            raise GraderFailed(
                f"its line {line.strip()!r:.80} is not read as a reward: write one number, as JSON writes it, or JSON "
                "Lines, and everything else to standard error"
            )
    if exit_status > FAILING_STATUS:
        raise GraderFailed(f"it ended with exit status {exit_status}; 0 is a reward of 1, 1 is a reward of 0")
    return [Grade(1.0 - exit_status)]


def as_rewards(value: Any) -> list[Grade]:
    """Return what a Python function gave: None, a number or a truth value, one mapping, or several of these.

    Raises:
        GraderFailed: it is none of these.
    """
    value = plain(value)
    if value is None:
        return []
    if isinstance(value, bool | int | float):
        return [Grade(finite(value))]
    if isinstance(value, Mapping):
        return [_from_object(value)]
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        listed = list(itertools.islice(value, MAX_LINES + 1))
        if len(listed) > MAX_LINES:
            raise GraderFailed(f"it returned more than {MAX_LINES} rewards, which is the limit; return fewer")
        return [reward for each in listed for reward in as_rewards(each)]
    raise GraderFailed(f"it returned {value!r:.200}; return a number, a dict with `value`, a list of these, or None")


def plain(value: Any) -> Any:
    """Return the Python value of a number or boolean of NumPy or PyTorch, and other values as they are."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def finite(value: float) -> float:
    """Return the value as a float.

    Raises:
        GraderFailed: it is NaN or infinite, or too large for a float.
    """
    with contextlib.suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    shown = value if isinstance(value, float) else "an integer of too many digits"
    raise GraderFailed(f"its reward is {shown!r}; a reward is a finite number")


def _check_success(exit_status: int) -> None:
    if exit_status != 0:
        raise GraderFailed(f"it wrote a reward and then ended with exit status {exit_status}; end it with 0")


def _is_unread(line: str) -> bool:
    """Return whether a line was meant as a verdict, beside other lines or in another form than a grader's."""
    if _LIKE_A_NUMBER.fullmatch(line) or line.lower().lstrip("+-") in _WORDS:
        return True
    try:
        given = json.loads(line) if line.startswith(("{", "[", '"')) else None
    except MALFORMED:
        return False
    if isinstance(given, dict):
        return not {"value", "reward", "score"}.isdisjoint(given)
    if isinstance(given, list):
        return len(given) == 1 and _is_number(given[0], int | float)
    return isinstance(given, str) and _is_unread(given)


def _from_lines(lines: list[str]) -> list[Grade]:
    if len(lines) > MAX_LINES:
        raise GraderFailed(f"it wrote {len(lines)} rewards; at most {MAX_LINES} are taken")
    rewards = []
    for line in lines:
        try:
            given = json.loads(line)
        except MALFORMED as error:
            raise GraderFailed(f"its line {line[:200]!r} is not JSON: {error}") from error
        rewards.append(_from_object(given))
    return rewards


def _from_object(given: Mapping[str, Any]) -> Grade:
    fields = {key: plain(value) for key, value in given.items()}
    for key, value in fields.items():
        if key not in _KEYS:
            raise GraderFailed(f"a reward has no field {key!r:.80}; it has {', '.join(_KEYS)}")
        if key == "value":
            continue
        if value is not None and not (_is_number(value, int) if key == "step" else _is_text(value)):
            raise GraderFailed(f"a reward's `{key}` is {value!r:.80}; give {'an integer' if key == 'step' else 'text'}")
    value = fields.get("value")
    if not _is_number(value, int | float):
        raise GraderFailed(f"a reward's `value` is {value!r:.80}; give a number")
    assert value is not None, "it is a number"
    return Grade(**{**fields, "value": finite(value)})


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that can be sent: Python's strings may hold half of a surrogate pair."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value


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
            stdin=json.dumps(document, ensure_ascii=False).encode(errors="backslashreplace"),
            capture=True,
        )
        if ended.timed_out:
            raise GraderFailed(f"{self.argv[0]!r} did not end within {self.timeout_seconds:g} s; its log is {log}")
        try:
            return read_verdict(ended.output, ended.exit_status)
        except GraderFailed as error:
            raise GraderFailed(f"{self.argv[0]!r} gave no reward: {error}; its log is {log}") from error


_TURN_FIELDS = (
    *("turn_id", "parent_turn_id", "chain_id", "seq", "step", "model", "finish_reason", "outcome", "reason"),
    *("messages", "response", "rewards"),
)


def document(session: Json, turns: Sequence[Json], task: Json | None = None) -> Json:
    """Return a session, its turns with what each adds, and the whole conversation of each chain once.

    A chain's `unsampled` are the places of the assistant messages that no turn of the session sampled: whoever calls
    the model can write them. `session` and `turns` are as the API returns them; `task` is the line of the tasks file,
    where there is one.
    """
    last = {turn["chain_id"]: turn["turn_id"] for turn in turns}
    sampled = {_said(turn["response"]) for turn in turns if turn["response"]}
    chains = []
    for chain_id, turn_id in last.items():
        chain = conversation(turns, turn_id)
        places = [at for at, message in enumerate(chain["messages"]) if message and message.get("role") == "assistant"]
        unsampled = [at for at in places if _said(chain["messages"][at]) not in sampled]
        chains.append({"chain_id": chain_id, **chain, "unsampled": unsampled})
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


def _said(message: Json) -> str:
    """Return what a reply says and calls, without what clients change: ids of calls, white space, forms of JSON."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments: Any = function.get("arguments")
        with contextlib.suppress(*MALFORMED):
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        calls.append([function.get("name"), arguments])
    return json.dumps([text_of(message.get("content")).split(), calls])


def _short(turn: Json) -> Json:
    return {name: turn.get(name) for name in _TURN_FIELDS}
