"""Writing processes for proxies in the test's own process, forked by the program that starts the tests' commands.

They are the real ones, without the second of CPU time in which an interpreter imports the store.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.commands import warm_commands
from support.warm_commands import WarmProcess
from support.warm_start import Namespace

from proxy.writer import client


def fork_writers() -> None:
    client.subprocess = Namespace(subprocess, Popen=_started)


def _started(_: Sequence[str], *, pass_fds: Sequence[int]) -> WarmProcess:
    return warm_commands().start(
        [],
        log=Path(f"/proc/{os.getpid()}/fd/2"),
        cwd=Path.cwd(),
        environment=os.environ,
        module="proxy.writer.process",
        descriptor=pass_fds[0],
    )
