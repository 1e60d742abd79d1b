"""Child processes kept running: started in order, restarted when they die, stopped together, never left behind.

The decision behind it: one thread owns all children and is a loop over their states, so starting, dying, backing off
and stopping cannot race. Each child runs under a guard that ends its whole process group, also when this process is
killed. What the children print goes to one file each; what is worth a person's attention is said in one line.
"""

from __future__ import annotations

import enum
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from turnwise.errors import ChildFailed
from turnwise.processes import guard

Say = Callable[[str, str], None]
"""Takes a child's name and what there is to say about it."""

_TICK_SECONDS = 0.05
_PROBE_SECONDS = 1.0
"""The longest that one look at a readiness URL may take."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process to keep running."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to what it inherits."""
    ready: str | Callable[[], bool] | None = None
    """A URL that answers 200, or a function that says so; None is ready as soon as it runs."""
    once: bool = False
    """Runs to its end, which must be a success, before the next one starts."""
    start_seconds: float = 180.0
    """The longest from start to ready."""
    grace_seconds: float = 10.0
    """From the term signal to the kill."""


class State(enum.StrEnum):
    """Life of a child: waiting → starting → ready → backing off → starting …; or finished, failed, stopped."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    FINISHED = "finished"
    """Ran once, to its end."""
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class _Run:
    """A child and what became of it so far."""

    child: Child
    log_path: Path
    state: State = State.WAITING
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_again_at: float = 0.0
    num_starts: int = 0
    num_quick_deaths: int = 0


class Supervisor:
    """A context manager: inside it all children are ready; after it none is left."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        log_directory: Path,
        say: Say | None = None,
        max_quick_deaths: int = 5,
        quick_seconds: float = 10.0,
        first_delay_seconds: float = 0.5,
    ) -> None:
        """Plan the children, in the order in which they start.

        Args:
            children: What to run; each starts when the one before it is ready.
            log_directory: Where `NAME.log` of each goes.
            say: Takes lines for a person; None says nothing.
            max_quick_deaths: So many deaths in a row, each soon after its start, and the child is given up.
            quick_seconds: What is soon.
            first_delay_seconds: Wait before the first restart; doubles from death to death, up to 30 s.
        """
        self._runs = [_Run(child, log_directory / f"{child.name}.log") for child in children]
        self._log_directory = log_directory
        self._say = say or _say_nothing
        self._max_quick_deaths = max_quick_deaths
        self._quick_seconds = quick_seconds
        self._first_delay_seconds = first_delay_seconds
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self.failure: str | None = None
        """Why the stack was given up."""

    def __enter__(self) -> Self:
        """Start all children and wait until they are ready.

        Raises:
            ChildFailed: one of them does not get there; all are stopped.
        """
        self._log_directory.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        try:
            # An untimed wait could not be interrupted by a signal's handler.
            while not self._settled.wait(0.2):
                pass
            self.check()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop all children."""
        self.stop()

    def check(self) -> None:
        """Do nothing while the stack stands.

        Raises:
            ChildFailed: a child was given up.
        """
        if self.failure is not None:
            raise ChildFailed(self.failure)

    def wait(self, stop: threading.Event) -> None:
        """Wait until `stop` is set.

        Raises:
            ChildFailed: a child was given up first.
        """
        while not stop.wait(0.2):
            self.check()

    def stop(self) -> None:
        """Stop all children, the last started first; returns when none is left."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def pid(self, name: str) -> int | None:
        """Return the process id of a child's guard; None while it does not run."""
        process = self._run(name).process
        return process.pid if process is not None and process.poll() is None else None

    def state(self, name: str) -> State:
        """Return where a child is in its life."""
        return self._run(name).state

    def num_starts(self, name: str) -> int:
        """Return how often a child was started."""
        return self._run(name).num_starts

    def _run(self, name: str) -> _Run:
        return next(run for run in self._runs if run.child.name == name)

    def _supervise(self) -> None:
        """Own the children until the end. The kernel ties them to this very thread."""
        try:
            while not self._stopping.is_set() and self.failure is None:
                self._tick()
                self._stopping.wait(_TICK_SECONDS)
        finally:
            for run in reversed(self._runs):
                self._stop(run)
            self._settled.set()

    def _tick(self) -> None:
        """Move each child one step on."""
        for position, run in enumerate(self._runs):
            if run.state is State.WAITING:
                if all(before.state in {State.READY, State.FINISHED} for before in self._runs[:position]):
                    self._start(run)
            elif run.state is State.BACKING_OFF:
                if time.monotonic() >= run.start_again_at:
                    self._start(run)
            elif run.state in {State.STARTING, State.READY}:
                self._look_at(run)
        if all(run.state in {State.READY, State.FINISHED} for run in self._runs):
            self._settled.set()

    def _start(self, run: _Run) -> None:
        child = run.child
        assignments = [f"{name}={value}" for name, value in child.env.items()]
        command = [sys.executable, "-I", "-S", str(guard.__file__), str(child.grace_seconds), str(os.getpid())]
        with run.log_path.open("ab") as log:
            run.process = subprocess.Popen(  # noqa: S603  argv is the caller's, no shell
                [*command, "env", *assignments, *child.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run.started_at = time.monotonic()
        run.num_starts += 1
        run.state = State.STARTING
        if run.num_starts == 1 and not child.once:
            self._say(child.name, f"starting; its log is {run.log_path}")

    def _look_at(self, run: _Run) -> None:
        code = run.process.poll() if run.process is not None else None
        if code is not None:
            self._bury(run, code)
        elif run.state is State.STARTING:
            waited = time.monotonic() - run.started_at
            if not run.child.once and is_ready(run.child.ready):
                run.state = State.READY
                self._say(run.child.name, f"ready after {waited:.1f} s")
            elif waited > run.child.start_seconds:
                self._give_up(run, f"is not ready after {run.child.start_seconds:.0f} s")

    def _bury(self, run: _Run, code: int) -> None:
        """Decide what a death means: the end of a task, a restart, or the end of all."""
        lived = time.monotonic() - run.started_at
        if run.child.once:
            if code == 0:
                run.state = State.FINISHED
                self._say(run.child.name, f"done after {lived:.1f} s")
            else:
                self._give_up(run, f"failed with {describe_exit(code)}")
            return
        run.num_quick_deaths = run.num_quick_deaths + 1 if lived < self._quick_seconds else 1
        if run.num_quick_deaths >= self._max_quick_deaths and lived < self._quick_seconds:
            self._give_up(run, f"died {run.num_quick_deaths} times in a row, last with {describe_exit(code)}")
            return
        delay = min(self._first_delay_seconds * 2 ** (run.num_quick_deaths - 1), 30.0)
        run.state = State.BACKING_OFF
        run.start_again_at = time.monotonic() + delay
        self._say(
            run.child.name, f"died with {describe_exit(code)} after {lived:.1f} s; restarting it in {delay:.1f} s"
        )

    def _give_up(self, run: _Run, why: str) -> None:
        run.state = State.FAILED
        tail = tail_of(run.log_path)
        self.failure = f"{run.child.name} {why}; the end of its log {run.log_path}:\n{tail}"

    def _stop(self, run: _Run) -> None:
        process = run.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(run.child.grace_seconds + 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._say(run.child.name, "stopped")
        if run.state not in {State.FAILED, State.FINISHED}:
            run.state = State.STOPPED


def is_ready(ready: str | Callable[[], bool] | None) -> bool:
    """Tell whether a child is ready by its own measure."""
    if ready is None:
        return True
    if callable(ready):
        return ready()
    # The environment's HTTP proxy has no business between a supervisor and its children.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(ready, timeout=_PROBE_SECONDS) as response:
            return bool(response.status == HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False


def describe_exit(code: int) -> str:
    """Name an exit status, as the guard passes it on."""
    number = -code if code < 0 else code - 128
    if number > 0 and number in set(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"exit status {code}"


def tail_of(path: Path, num_lines: int = 20) -> str:
    """Return the last lines of a log, indented."""
    with path.open("rb") as log:
        lines = deque(_lines_near_end(log), maxlen=num_lines)
    return "\n".join(f"    {line.decode(errors='replace').rstrip()}" for line in lines) or "    (empty)"


def _lines_near_end(log: BinaryIO, num_bytes: int = 64 * 1024) -> list[bytes]:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - num_bytes))
    return log.readlines()


def _say_nothing(_name: str, _text: str) -> None:
    pass
