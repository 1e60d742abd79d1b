"""Servers of tests: processes that start and end, and servers of the standard library in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.waiting import POLL_SECONDS, WAIT_SECONDS

from turnwise.processes.supervisor import is_ready, tail_of

if TYPE_CHECKING:
    from support.warm_commands import WarmProcess


def wait_ready(url: str, process: subprocess.Popen[bytes] | WarmProcess, log: Path, seconds: float) -> None:
    """Wait until a server answers; a failure has the end of its log, also where its process has ended."""
    deadline = time.monotonic() + seconds
    while not is_ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"nothing answers at {url}; the end of the server's log:\n{tail_of(log, 40)}")
        time.sleep(POLL_SECONDS)


def end_group(process: subprocess.Popen[bytes] | WarmProcess, seconds: float = WAIT_SECONDS) -> None:
    """End a process and its group by SIGTERM, and by SIGKILL where that takes longer."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


@contextlib.contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    """Serve in a thread until the block ends; yield the server's URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
