"""Writing and reading processes for proxies in a test's process, forked by the program that starts the tests' commands.

They are the real ones, without the second of CPU time in which an interpreter imports the store.
"""

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.commands import warm_commands
from support.warm_commands import WarmProcess
from support.warm_start import Namespace

from proxy.reload import version_files
from proxy.writer import client


def fork_writers() -> None:
    for module, program in ((client, "proxy.writer.process"), (version_files, "proxy.reload.reading_process")):
        module.subprocess = Namespace(subprocess, Popen=functools.partial(_started, program))


def _started(program: str, _: Sequence[str], *, pass_fds: Sequence[int]) -> WarmProcess:
    return warm_commands().start(
        [],
        log=Path(f"/proc/{os.getpid()}/fd/2"),
        cwd=Path.cwd(),
        environment=os.environ,
        module=program,
        descriptor=pass_fds[0],
    )
