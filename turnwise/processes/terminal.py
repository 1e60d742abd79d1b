"""What a terminal shows of processes: the matching lines of their logs, printed although nobody may read them.

A process must go on and end while its output is not read, so a thread of its own prints.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from turnwise.telemetry.logs import SlowLines

Say = Callable[[str, str], None]


def printing(say: Say) -> SlowLines[tuple[str, str]]:
    """Return what prints lines in its own thread, and drops those that nobody reads: the children's logs have them."""

    def print_line(line: tuple[str, str]) -> None:
        with contextlib.suppress(OSError):  # the reader has ended
            say(*line)

    return SlowLines(print_line)


def print_last_line(say: Say, name: str, text: str) -> None:
    """Print the last line of a process; if nobody reads it, let the process end without it."""
    lines = printing(say)
    lines.put((name, text))
    if not lines.flush():
        # A thread that waits for the reader holds the lock of standard output, which Python flushes at the end.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  open until the end of the process


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
