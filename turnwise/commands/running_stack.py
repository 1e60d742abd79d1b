"""The state file of a running `turnwise up`: other commands find its database and its addresses through it.

The file is locked as long as `turnwise up` lives. The kernel releases the lock however the process ends, so a file
that a killed process left behind is recognised: no process holds its lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import SettingsError
from turnwise.files import is_locked, lock

STATE_FILE = Path(".turnwise-up.json")
"""In the directory in which `turnwise up` was started; readable to its owner alone, it may hold a password."""


@dataclass(frozen=True)
class RunningStack:
    """Where the parts of a running `turnwise up` are."""

    pid: int
    database: str
    proxy: str
    engines: list[str]


@contextlib.contextmanager
def announced(stack: RunningStack) -> Iterator[None]:
    """Keep the state file while the block runs.

    Raises:
        SettingsError: another `turnwise up` runs in this directory.
    """
    STATE_FILE.touch(mode=0o600)
    try:
        locked = lock(STATE_FILE)
    except BlockingIOError as error:
        raise SettingsError(_already_runs()) from error
    with locked as file:
        file.truncate(0)
        json.dump(dataclasses.asdict(stack), file)
        file.flush()
        try:
            yield
        finally:
            STATE_FILE.unlink(missing_ok=True)


def check_none_runs() -> None:
    """Refuse a second `turnwise up` in one directory."""
    if find_running_stack() is not None:
        raise SettingsError(_already_runs())


def find_running_stack() -> RunningStack | None:
    """Return the `turnwise up` that runs in this directory; None where there is none."""
    try:
        if not is_locked(STATE_FILE):
            return None
        return RunningStack(**json.loads(STATE_FILE.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None  # no file, or one that is being written


def _already_runs() -> str:
    return (
        "`turnwise up` runs in this directory already; stop it first, or start this one in another directory: "
        "both would use one database and one trainer"
    )
