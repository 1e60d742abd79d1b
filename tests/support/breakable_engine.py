"""A fake engine as a process that breaks during a reload, as the name of the directory requests.

A directory with WORD in its path makes the engine do WHAT while it loads it: `die` at once, `die_late` once the
directory has a file `die`, `hang`, or `refuse`. Everything else it does as `turnwise fake-engine` does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from support.waiting import WAIT_SECONDS

if TYPE_CHECKING:
    from support.warm_commands import WarmProcess

DEATH = 9
LOADING = "loading"
"""File that an engine which dies late makes when it starts to load the directory."""
DIE = "die"
"""File that ends such an engine."""


class BreakableEngine:
    """The process; it can be restarted on the same port, with its original weights."""

    def __init__(self, port: int, **faults: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = [str(port), *(f"{word}={what}" for word, what in faults.items())]
        self.process = self._started()

    def _started(self) -> WarmProcess:
        from support.commands import warm_commands
        from support.servers import wait_ready

        log = Path(os.devnull)
        process = warm_commands().start(
            self._arguments, module=__name__, log=log, cwd=Path.cwd(), environment=os.environ
        )
        wait_ready(f"{self.url}/health", process, log, WAIT_SECONDS)
        return process

    def restart(self) -> None:
        self.kill()
        self.process = self._started()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(port: int, faults: Mapping[str, str]) -> None:
    from turnwise_fake_engine import Script, control
    from turnwise_fake_engine import serve as serve_fake

    def has_weights(directory: Path) -> bool:
        what = next((what for word, what in faults.items() if word in directory.name), "load")
        if what == "die_late":
            (directory / LOADING).touch()
            while not (directory / DIE).exists():
                time.sleep(0.01)
        if what.startswith("die"):
            os._exit(DEATH)
        if what == "hang":
            time.sleep(3600)
        return what != "refuse" and directory.is_dir()

    control.has_weights = has_weights
    serve_fake(Script(pace_seconds=0.01), host="127.0.0.1", port=port)


def main() -> None:
    """Run as a process; the arguments are `PORT [WORD=WHAT ...]`."""
    serve(int(sys.argv[1]), dict(argument.split("=") for argument in sys.argv[2:]))
