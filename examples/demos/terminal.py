"""What a demo shows: a line for each event, and below it what is being done, how far it is, and for how long.

Where the output is no terminal, each task is one line at its start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]
"""Takes how many steps of a task are done."""


class Terminal:
    """Prints lines with the elapsed seconds, and shows what is being done."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._console = Console(highlight=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)

    def __call__(self, who: str, text: str) -> None:
        """Print a line."""
        line = f"{time.monotonic() - self._started:6.1f} s  {who:8s} {text}"
        self._console.print(line, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def doing(self, text: str, total: int | None = None) -> Iterator[Advance]:
        """Show a task until the block ends; without a total, only that it goes on."""
        if not self._console.is_terminal:
            self("demo", text)
            yield lambda _: None
            return
        task = self._progress.add_task(text, total=total)
        self._progress.start()
        try:
            yield lambda done: self._progress.update(task, completed=done)
        finally:
            self._progress.remove_task(task)
            if not self._progress.task_ids:
                self._progress.stop()
