"""The file with the verdicts of the tables: one for each agent, with engine, version, date and commit.

It is part of the repository, so that a part of the agents can be played again without losing the others' rows.
"""

import dataclasses
import datetime
import fcntl
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harnesses.entry import ROOT, Harness
from harnesses.play import Verdict

Stored = Mapping[str, Mapping[str, Any]]
"""Verdicts by the agent's name."""
FILE = Path(__file__).parent / "verdicts.json"
PLAYED = ("proxy", "turnwise", "migrations", "tests/harnesses", "tests/support", ":(exclude)tests/harnesses/*.json")
"""The code that a verdict depends on, as git takes it."""


class Verdicts:
    def __init__(self, file: Path, commit: str) -> None:
        self._file = file
        self._commit = commit

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)

    def read(self) -> Stored:
        return dict(json.loads(self._file.read_text())) if self._file.exists() else {}

    def has(self, harness: Harness) -> bool:
        """Return whether there is a verdict on the pinned version of an agent, made on the present commit."""
        stored = self.read().get(harness.name)
        return stored is not None and (stored["version"], stored["commit"]) == (harness.version, self._commit)

    def add(self, harness: Harness, engine: str, verdict: Verdict) -> None:
        """Add or replace the verdict on an agent; concurrent commands do not lose each other's."""
        played = {
            "version": harness.version,
            "engine": engine,
            "date": str(datetime.datetime.now(datetime.UTC).date()),
            "commit": self._commit,
        }
        self._replace(harness.name, lambda _: {**played, **dataclasses.asdict(verdict)})

    def amend(self, harness: Harness, cells: Mapping[str, str]) -> None:
        """Replace some cells of an agent's row; nothing where it has none."""
        self._replace(harness.name, lambda row: row and row | {"cells": row["cells"] | cells})

    def _replace(self, name: str, change: Callable[[Any], Any]) -> None:
        with self._file.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            stored = json.loads(file.read() or "{}")
            if (row := change(stored.get(name))) is not None:
                stored[name] = row
            file.truncate(0)
            file.write(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def present_commit(depends_on: Sequence[str] = PLAYED) -> str:
    commit = _git("rev-parse", "--short=10", "HEAD")
    return f"{commit}-changed" if _git("status", "--porcelain", "--", *depends_on) else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
