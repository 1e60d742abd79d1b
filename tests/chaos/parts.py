"""The parts of a running system, each with its faults: proxies, trainers, engines and their connections."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.proxies import RunningProxy, running_proxy, wait_until_gone

PROXY_FLAGS = (
    "--policy-tenant",
    "default",
    *("--commit-timeout-seconds", "3", "--engine-timeout-seconds", "5", "--reload-timeout-seconds", "5"),
    # Small caches: memory must be flat, and evicted entries must be read from the store.
    *("--cache-bytes", "1048576"),
)
TRAINER_PROGRAM = Path(__file__).parents[1] / "support" / "claiming_trainer.py"
KIBIBYTE = 1024


class ProxyPart:
    def __init__(self, engines: list[str], database_url: str, directory: Path, port: int) -> None:
        self._engines, self._database_url, self._directory, self._port = engines, database_url, directory, port
        self._running = contextlib.ExitStack()
        self.proxy = self._started()

    def _started(self) -> RunningProxy:
        first, *others = self._engines
        flags = [flag for url in others for flag in ("--engine", url)]
        return self._running.enter_context(
            running_proxy(first, self._database_url, self._directory, *flags, *PROXY_FLAGS, port=self._port)
        )

    def kill(self) -> None:
        """`kill -9` the proxy; its writing process has to end by itself, as soon as it runs if it was stopped."""
        writer = self.proxy.writing_process()
        self.proxy.kill()
        _send(writer, signal.SIGCONT)
        wait_until_gone(writer)

    def kill_writer(self) -> None:
        """`kill -9` the process that writes; the proxy has to replace it."""
        for writer in self._writers():
            _send(writer, signal.SIGKILL)

    def _writers(self) -> list[int]:
        """Return the process that writes; none while the proxy is killed."""
        return [self.proxy.writing_process()] if self.proxy.process.poll() is None else []

    def restart(self) -> None:
        self._running.close()
        self.proxy = self._started()

    @contextlib.contextmanager
    def stopped(self, *, writer: bool = False) -> Iterator[None]:
        with contextlib.ExitStack() as signalled:
            for pid in self._writers() if writer else [self.proxy.process.pid]:
                signalled.enter_context(_signalled(pid, signal.SIGSTOP, signal.SIGCONT))
            yield

    @contextlib.contextmanager
    def full_disk(self, database: Path) -> Iterator[None]:
        """Prevent every file of its processes from growing, as on a full disk, until the block ends."""
        pids = [self.proxy.process.pid, *self._writers()]
        size = max(path.stat().st_size for path in database.parent.iterdir())
        limits = {}
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 4 * KIBIBYTE, limits[pid][1]))
        yield
        for pid, limit in limits.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit[1], limit[1]))

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.proxy.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def close(self) -> None:
        self._running.close()


class TrainerPart:
    """A trainer that claims and acks without training; it is restarted after it has ended."""

    def __init__(self, number: int, database_url: str, skew_seconds: float, clock: Path, directory: Path) -> None:
        self._output = directory / f"trainer-{number}.log"
        self._command = [sys.executable, str(TRAINER_PROGRAM), database_url, f"trainer-{number}", str(number)]
        self._command += [str(skew_seconds), str(clock)]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as file:
            return subprocess.Popen(self._command, stdout=file, stderr=file)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def revive(self) -> None:
        """Start it again if it has ended, by a kill or because its database was unreachable."""
        if self._process.poll() is not None:
            self._process = self._started()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        with _signalled(self._process.pid, signal.SIGSTOP, signal.SIGCONT):
            yield

    def close(self) -> None:
        self.kill()


@contextlib.contextmanager
def _signalled(pid: int, first: int, last: int) -> Iterator[None]:
    _send(pid, first)
    try:
        yield
    finally:
        _send(pid, last)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
