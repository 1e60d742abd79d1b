"""Prints lines for a process that must go on and end while nobody reads its output."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str, str], None]
"""Prints a line: a child's name, and the text."""

MAX_UNPRINTED = 1000
"""Lines that wait for the reader of the output; further ones are dropped, the children's logs have them."""
PRINT_SECONDS = 2.0
"""How long a stop waits until these lines are printed."""


class Printer:
    """Prints lines in its own thread."""

    def __init__(self, say: Say) -> None:
        """Start the thread."""
        self._say = say
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="supervisor output", daemon=True)
        self._thread.start()

    def print(self, name: str, text: str) -> None:
        """Print a line later, unless too many wait."""
        if self._lines.qsize() < MAX_UNPRINTED:
            self._lines.put((name, text))

    def close(self) -> bool:
        """Wait until all lines are printed, `PRINT_SECONDS` at most; return whether they are."""
        self._lines.put(None)
        self._thread.join(PRINT_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the reader has ended; the children's logs have the lines
            while (line := self._lines.get()) is not None:
                self._say(*line)


def print_last_line(say: Say, name: str, text: str) -> None:
    """Print the last line of a process; if nobody reads it, let the process end without it."""
    printer = Printer(say)
    printer.print(name, text)
    if not printer.close():
        # A thread that waits for the reader holds the lock of standard output, which Python flushes at the end.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  open until the end of the process
