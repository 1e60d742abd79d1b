"""Start the processes that a benchmark measures as an operator starts them, and stop them at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from turnwise.processes.stack import command, free_port
from turnwise.processes.supervisor import is_ready
from turnwise.store.database import Database

START_SECONDS = 180


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
def proxy_and_engine(*flags: str) -> Iterator[Served]:
    """Run a proxy over a fresh SQLite file, in front of a fake engine."""
    engine, proxy = free_port(), free_port()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        database_url = f"sqlite:///{directory}/bench.db"
        database = Database(database_url)
        database.upgrade()
        database.close()
        engine_url, url = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{proxy}"
        servers.enter_context(running(command("fake-engine", "--port", str(engine)), f"{engine_url}/health"))
        argv = command("proxy", "--engine", engine_url, "--database", database_url, "--port", str(proxy), *flags)
        process = servers.enter_context(running([*argv, "--log-level", "warning"], f"{url}/readyz"))
        yield Served(url, engine_url, process.pid, database_url, Path(directory))
