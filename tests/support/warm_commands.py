"""Starts `turnwise` commands as forks of one process that has imported their modules already.

It reads a line of JSON for each start and writes a line for each start and each end. A proxy needs two seconds of CPU
for its imports, and the tests start hundreds of proxies; `warm_start.py` has what else they are spared. Everything else
is as after `python -m turnwise`: a separate process, in its own process group, with its own environment, directory
and log.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from support import warm_start

CLI = "turnwise.commands.cli"
IMPORTED = (
    "proxy.main",
    CLI,
    "turnwise.commands.preflight",
    "turnwise.commands.place",
    "turnwise.processes.ports",
    "alembic.command",
    "alembic.autogenerate",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "sqlalchemy.dialects.postgresql.psycopg",
    "httpx2",
    "jinja2.meta",
    "transformers.models.auto.tokenization_auto",
    "uvicorn.lifespan.off",
    "uvloop",
    "support.breakable_engine",
    "turnwise_fake_engine.server",
)
"""What a proxy and a stand-in engine import until they are ready."""

FIRST_KEPT = 64
"""A command closes the descriptors below it; the one that it was given is above."""
TESTS = Path(__file__).parents[1]
PROGRAM = f"import sys; sys.path[0] = {str(TESTS)!r}; from support.warm_commands import main; main()"


class WarmProcess:
    """A started command, with those attributes of `subprocess.Popen` that the tests use."""

    def __init__(self, parent: WarmCommands, pid: int, args: Sequence[str]) -> None:
        self._parent = parent
        self.pid = pid
        self.args = args

    @property
    def returncode(self) -> int | None:
        """The exit status, or the negative number of the signal that ended it; None as far as is known."""
        return self._parent.statuses.get(self.pid)

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        self._parent.receive(0.0, until=lambda: self.returncode is not None)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._parent.receive(timeout, until=lambda: self.returncode is not None)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmCommands:
    """The program, as a child of the test process. It ends, and all its commands with it, when its stdin closes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._unread = b""
        self._started: list[int] = []
        self.statuses: dict[int, int] = {}
        """Exit statuses of ended commands by process id."""
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def start(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        cwd: Path,
        environment: Mapping[str, str],
        errors: Path | None = None,
        module: str = CLI,
        descriptor: int | None = None,
    ) -> WarmProcess:
        """Start `turnwise`, or another module's `main`, with these arguments.

        The output is appended to the log, stderr to `errors` if given. A descriptor is for a writing process: it is its
        only argument.
        """
        order = {"arguments": list(arguments), "log": str(log), "errors": str(errors or log), "module": module}
        order |= {"has_descriptor": descriptor is not None, "parent": os.getpid()}
        order |= {"cwd": str(cwd), "environment": dict(environment)}
        with self._lock:
            _pipe(self._process.stdin).write(json.dumps(order).encode() + b"\n")
            _pipe(self._process.stdin).flush()
            if descriptor is not None:
                socket.send_fds(self._link, [b"."], [descriptor])
            self.receive(None, until=lambda: bool(self._started))
            pid = self._started.pop()
            self.statuses.pop(pid, None)  # of an earlier process with this id
            return WarmProcess(self, pid, arguments)

    def receive(self, seconds: float | None, *, until: Callable[[], bool]) -> None:
        """Read reports until a condition holds, the time is over, or the program has ended."""
        end = None if seconds is None else time.monotonic() + seconds
        while not until():
            with self._lock:
                if until():
                    return
                left = 0.05 if end is None else min(0.05, max(0.0, end - time.monotonic()))
                if select.select([_pipe(self._process.stdout)], [], [], left)[0]:
                    self._read()
                elif end is not None and time.monotonic() >= end:
                    return

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()
        _pipe(self._process.stdout).close()
        self._link.close()

    def _read(self) -> None:
        received = os.read(_pipe(self._process.stdout).fileno(), 65536)
        assert received, "the program that starts commands has ended"
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "status" in report:
                self.statuses[report["pid"]] = report["status"]
            else:
                self._started.append(report["pid"])


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def become(order: dict[str, Any], descriptor: int | None) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log, errors = (os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for name in ("log", "errors"))
    for target, source in ((0, nothing), (1, log), (2, errors)):
        os.dup2(source, target)
    kept = None if descriptor is None else fcntl.fcntl(descriptor, fcntl.F_DUPFD, FIRST_KEPT)
    os.closerange(3, FIRST_KEPT)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["turnwise", *order["arguments"]]
    if kept is not None:
        sys.argv = ["-c", str(kept)]
        sys.path.insert(0, order["cwd"])  # as `python -c` has it: jobs are pickled functions, of tests too
        os.getppid = lambda: order["parent"]  # it writes only for the process that asked for it
        Path("/proc/self/comm").write_text(warm_start.WRITER_NAME)
    elif order["arguments"][0] == "proxy":
        warm_start.fork_children(order["arguments"])
    import_module(order["module"]).main()
    sys.exit()


class Starter:
    """Forks this process for each order, and reports the ends of its children."""

    def __init__(self) -> None:
        self._link = socket.socket(fileno=int(sys.argv[1]))
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._running: set[int] = set()
        self._unread = b""

    def run(self) -> None:
        """Work until stdin ends; kill what runs then."""
        is_open = True
        while is_open:
            readable = select.select([0, self._woken], [], [])[0]
            if self._woken in readable:
                os.read(self._woken, 4096)
                self._report_ends()
            if 0 in readable:
                is_open = self._start_ordered()
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _report_ends(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._running.remove(pid)
                print(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)

    def _start_ordered(self) -> bool:
        """Start the command that stdin requests; return whether stdin is still open."""
        received = os.read(0, 65536)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            order = json.loads(line)
            descriptors = socket.recv_fds(self._link, 1, 1)[1] if order["has_descriptor"] else []
            pid = os.fork()
            if pid == 0:
                become(order, *(descriptors or [None]))
            for descriptor in descriptors:
                os.close(descriptor)
            self._running.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
        return bool(received)


def main() -> None:
    sys.modules["torch"] = None  # as `proxy.main` does
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    sys.path.remove(str(TESTS))
    # A process that has used the threads of tokenizers warns when it is forked, and its forks use one thread.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warm_start.share_template()
    gc.collect()
    gc.freeze()
    gc.enable()
    Starter().run()
