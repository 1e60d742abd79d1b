"""Start the processes that a benchmark measures as an operator starts them, and stop them at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.processes.engine_command import EngineSettings, build_command
from turnwise.processes.ports import free_port
from turnwise.processes.stack import command
from turnwise.processes.supervisor import is_ready
from turnwise.store.database import Database

START_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class Served:
    """A proxy in front of a fake engine."""

    url: str
    engine_url: str
    pid: int
    database_url: str
    directory: Path


@contextlib.contextmanager
def running(argv: list[str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv} did not start")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(START_SECONDS)


@contextlib.contextmanager
def real_engine(**settings: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run vLLM on the CPU until the block ends; yield its URL and its process."""
    port = free_port()
    started = build_command(EngineSettings(port=port, device="cpu", weight_transfer=False, **settings))
    variables = [f"{name}={value}" for name, value in started.environment.items()]
    url = f"http://127.0.0.1:{port}"
    with running(["env", *variables, *started.argv], f"{url}/health") as process:
        yield url, process


@contextlib.contextmanager
def proxy_of(engine_url: str, database_url: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a proxy over a database, which is brought up to date; yield its URL and its process."""
    database = Database(database_url)
    database.upgrade()
    database.close()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = command("proxy", "--engine", engine_url, "--database", database_url, "--port", str(port), *flags)
    with running([*argv, "--log-level", "warning"], f"{url}/readyz") as process:
        yield url, process


@contextlib.contextmanager
def proxy_and_engine(*flags: str) -> Iterator[Served]:
    """Run a proxy over a fresh SQLite file, in front of a fake engine."""
    port = free_port()
    engine_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        database_url = f"sqlite:///{directory}/bench.db"
        servers.enter_context(running(command("fake-engine", "--port", str(port)), f"{engine_url}/health"))
        url, process = servers.enter_context(proxy_of(engine_url, database_url, *flags))
        yield Served(url, engine_url, process.pid, database_url, Path(directory))
