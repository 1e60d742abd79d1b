"""Tasks of `turnwise run`: lines of a file, their splits, and how `{name}` in a command is filled."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import SettingsError
from turnwise.types import Json

_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_]*)\}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_:@~-]+")
_NO_NAME = re.compile(r"[^A-Za-z0-9_]+")
MAX_SLUG_LENGTH = 100
RUN_FIELDS = frozenset({"task_id", "model", "base_url", "api_key"})


@dataclass(frozen=True, slots=True)
class Task:
    """One task."""

    task_id: str
    fields: Json
    split: str | None = None

    @property
    def slug(self) -> str:
        """The id as a part of session ids and paths; different ids have different slugs."""
        slug = _UNSAFE.sub("-", self.task_id)[:MAX_SLUG_LENGTH]
        if slug == self.task_id:
            return slug
        return f"{slug}-{hashlib.blake2b(self.task_id.encode(), digest_size=4).hexdigest()}"

    def variables(self) -> dict[str, str]:
        """Return the line as environment variables: the whole line, and each string, number and boolean by its name."""
        scalars = {name: value for name, value in self.fields.items() if isinstance(value, str | int | float | bool)}
        named = {f"TURNWISE_TASK_{_NO_NAME.sub('_', name).upper()}": as_text(value) for name, value in scalars.items()}
        whole = json.dumps(self.fields, ensure_ascii=False)
        return {**named, "TURNWISE_TASK": whole, "TURNWISE_TASK_ID": self.task_id}


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def fill(argument: str, values: Mapping[str, Any]) -> str:
    """Replace each `{name}` of a known name by its value; other braces, and a shell's `${name}`, are unchanged."""
    return _PLACEHOLDER.sub(lambda found: as_text(values[found[1]]) if found[1] in values else found[0], argument)


def unfilled(arguments: Iterable[str], tasks: Iterable[Task]) -> list[str]:
    """Return the names in braces in a command's arguments that are fields of no task."""
    known = RUN_FIELDS.union(*(task.fields for task in tasks))
    named = (found[1] for argument in arguments for found in _PLACEHOLDER.finditer(argument))
    return [name for name in dict.fromkeys(named) if name not in known]


def load_tasks(path: Path, split: str | None = None) -> list[Task]:
    """Return the tasks of a JSON Lines file, only those of one split if it is given."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` would cut texts at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingsError(f"cannot read the tasks file {str(path)!r}: {reason}; give a JSON Lines file") from error
    tasks = [_task(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return chosen(tasks, split, str(path))


def chosen(tasks: Iterable[Task], split: str | None, source: str) -> list[Task]:
    """Return the tasks of a split.

    Raises:
        SettingsError: two have one id, or none is left.
    """
    found = [task for task in tasks if split is None or task.split in (None, split)]
    seen: set[str] = set()
    for task in found:
        if task.task_id in seen:
            raise SettingsError(f"{source}: two tasks have the id {task.task_id!r}; ids must differ")
        seen.add(task.task_id)
    if not found:
        raise SettingsError(f"{source} has no task{f' of split {split!r}' if split else ''}; write one a line")
    return found


def _task(path: Path, number: int, line: str) -> Task:
    where = f"{path}:{number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{where} is not JSON: {error}; write one task a line") from error
    if not isinstance(fields, dict):
        raise SettingsError(f"{where} is {line[:80]!r}; a task is a JSON object")
    task_id = fields.get("task_id", fields.get("id", number))
    if isinstance(task_id, bool) or not isinstance(task_id, str | int) or not str(task_id):
        raise SettingsError(f"{where} has the task_id {task_id!r}; give a text or an integer")
    split = fields.get("split")
    if split not in (None, "train", "eval"):
        raise SettingsError(f"{where} has the split {split!r}; give 'train', 'eval', or none")
    return Task(str(task_id), fields, split)
