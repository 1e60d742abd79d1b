"""Follow a log file: the new lines that match a pattern, for a terminal that shows what a child process does."""

from __future__ import annotations

import os
import re
from pathlib import Path

LOG_LINE = r"^\S+ \S+ (?:(?:WARNING|ERROR) [\w.]+|INFO (?:{loggers})): (?P<text>.*)$"
"""A line of our processes' logs: warnings and errors of every logger, and all lines of some."""


def lines_of(*loggers: str) -> re.Pattern[str]:
    return re.compile(LOG_LINE.format(loggers="|".join(map(re.escape, loggers)) or "(?!)"))


class LogFollower:
    """Reads a growing file; a line counts once it has its end."""

    def __init__(self, path: Path, pattern: re.Pattern[str]) -> None:
        self._path = path
        self._pattern = pattern
        self._position = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        """Return the texts of matching lines that were written since the last call.

        A file that has become shorter was emptied, for example by logrotate, and is read from its start; one that was
        deleted has no lines.
        """
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._position:
                    self._position = 0
                file.seek(self._position)
                read = file.read()
        except FileNotFoundError:
            return []
        complete = read[: read.rfind(b"\n") + 1]
        self._position += len(complete)
        found = (self._pattern.match(line) for line in complete.decode(errors="replace").splitlines())
        return [match["text"] for match in found if match]
