"""Child processes: start order, restarts, when a repeated error stops everything, and a stop of all together.

One thread owns all children and loops over their states, so starting, dying, backing off and stopping cannot race. Each
child runs under a guard that ends its whole process group, also when this process is killed. The output of each child
goes to its own file; the supervisor prints one line for each event. Another thread prints, because the reader of
the terminal or pipe may stop, and the children must be restarted and stopped all the same.
"""

from __future__ import annotations

import enum
import http.client
import os
import re
import signal
import subprocess
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
from turnwise.files import create_private
from turnwise.processes import guard, ports
from turnwise.processes.progress import Progress
from turnwise.processes.terminal import LogFollower, Say, printing
from turnwise.settings import child_environment

_TICK_SECONDS = 0.05
_ERROR_LINE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Refused|Failed)\b: .*|^turnwise: .*")
"""The last line of a traceback, or an error of one of our commands."""
_NUMBER = re.compile(r"\d+")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
MAX_ERROR_CHARACTERS = 400
_PROBE_SECONDS = 1.0
PORT_RELEASE_SECONDS = 10.0
PERMANENT_STATUS = 2
"""Exit status of a child that a restart does not help: wrong settings, a taken port, an incomplete model."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A process to keep running."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the inherited environment. Secrets belong here: other users see a command line, not an environment."""
    ready: str | Callable[[], bool] | None = None
    """A URL that answers 200, or a function that returns True; None: ready as soon as it runs."""
    port: int | None = None
    """The port that it listens on. It must be free before the start, and only the child's own answer counts."""
    shown_lines: re.Pattern[str] | None = None
    """Lines of its log that are printed too, as the group `text`; None prints none."""
    starts_early: bool = False
    """Start as soon as the child before it has started: it waits for that one itself."""
    start_seconds: float = 180.0
    """The longest that it may take until it is ready, from when all before it are; without progress, a tenth of it."""
    grace_seconds: float = 10.0


class ChildState(enum.StrEnum):
    """State of a child: waiting → starting → ready → backing off → starting …; or failed, stopped."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass
class _ChildRun:
    """A child and its state."""

    child: Child
    log_path: Path
    state: ChildState = ChildState.WAITING
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_again_at: float = 0.0
    num_starts: int = 0
    follower: LogFollower | None = None
    log_start: int = 0
    """Where the log of the latest start begins, bytes."""
    progress: Progress | None = None
    """What its start has shown since it is the one that is waited for; None before, and once it is ready."""
    reported_at: float = 0.0
    num_quick_deaths: int = 0
    """In a row: quick ones, or further ones within `alike_seconds` by the same error."""
    error: str | None = None
    is_asked_to_end: bool = False
    """By `restart`, so that its end is no death."""


class Supervisor:
    """A context manager: inside the block all children are ready; after it none runs."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        log_directory: Path,
        say: Say | None = None,
        max_quick_deaths: int = 5,
        quick_seconds: float = 10.0,
        alike_seconds: float = 600.0,
        first_delay_seconds: float = 0.5,
        report_seconds: float = 60.0,
    ) -> None:
        """Plan the children; each starts when those before it are ready, unless it `starts_early`.

        The stack is given up after `max_quick_deaths` quick deaths in a row. A death is quick before the child was
        ready, `quick_seconds` after the start, and, with the error of the death before, `alike_seconds` after it. The
        delay before a restart begins with `first_delay_seconds` and doubles with each death, up to 30 s. What a child
        does that is waited for is said each `report_seconds`.
        """
        self._runs = [_ChildRun(child, log_directory / f"{child.name}.log") for child in children]
        self._log_directory = log_directory
        self._printed = printing(say or (lambda _name, _text: None))
        self._max_quick_deaths = max_quick_deaths
        self._quick_seconds = quick_seconds
        self._alike_seconds = alike_seconds
        self._first_delay_seconds = first_delay_seconds
        self._report_seconds = report_seconds
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self.failure: str | None = None
        """Why the stack was given up; None while it runs."""

    def __enter__(self) -> Self:
        """Start all children and wait until they are ready.

        Raises:
            ChildFailed: one of them does not become ready; all are stopped.
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
        self.stop()

    def check(self) -> None:
        """Raise if the stack was given up.

        Raises:
            ChildFailed: it was.
        """
        if self.failure is not None:
            raise ChildFailed(self.failure)

    def wait(self, stop: threading.Event) -> None:
        """Wait until `stop` is set.

        Raises:
            ChildFailed: the stack was given up first.
        """
        while not stop.wait(0.2):
            self.check()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._printed.flush()

    def say(self, name: str, text: str) -> None:
        self._printed.put((name, text))

    def pid(self, name: str) -> int | None:
        process = self._run(name).process
        return process.pid if process is not None and process.poll() is None else None

    def restart(self, name: str) -> None:
        """Let a child end, and start it again at once."""
        run = self._run(name)
        assert run.process is not None, "it was started"
        run.is_asked_to_end = True
        run.process.send_signal(signal.SIGTERM)

    def state(self, name: str) -> ChildState:
        return self._run(name).state

    def num_starts(self, name: str) -> int:
        return self._run(name).num_starts

    def _run(self, name: str) -> _ChildRun:
        return next(run for run in self._runs if run.child.name == name)

    def _supervise(self) -> None:
        """Own the children until the end. The kernel ties them to this thread."""
        try:
            while not self._stopping.is_set() and self.failure is None:
                self._tick()
                self._stopping.wait(_TICK_SECONDS)
        except Exception as error:  # noqa: BLE001  the thread's outermost edge: otherwise the main thread would wait forever
            self.failure = f"the processes were stopped, because they cannot be supervised: {error!r}"
        finally:
            for run in reversed(self._runs):
                self._stop(run)
            self._settled.set()

    def _tick(self) -> None:
        for position, run in enumerate(self._runs):
            if run.state is ChildState.WAITING:
                if self._may_start(run, self._runs[:position]):
                    self._start(run)
            elif run.state is ChildState.BACKING_OFF:
                if time.monotonic() >= run.start_again_at:
                    self._start(run)
            elif run.state in {ChildState.STARTING, ChildState.READY}:
                self._check(run, self._runs[:position])
            for line in run.follower.new_lines() if run.follower is not None else ():
                self.say(run.child.name, line)
        if all(run.state is ChildState.READY for run in self._runs):
            self._settled.set()

    @staticmethod
    def _may_start(run: _ChildRun, before: Sequence[_ChildRun]) -> bool:
        if run.child.starts_early:
            return all(each.num_starts > 0 for each in before)
        return all(each.state is ChildState.READY for each in before)

    def _start(self, run: _ChildRun) -> None:
        child = run.child
        if child.port is not None and not ports.is_free(child.port):
            self._handle_taken_port(run, child.port)
            return
        create_private(run.log_path)
        with run.log_path.open("ab") as log:
            run.log_start = log.tell()
            if child.shown_lines is not None and run.follower is None:
                run.follower = LogFollower(run.log_path, child.shown_lines)
            run.process = subprocess.Popen(  # noqa: S603  argv is the caller's, no shell
                guard.guarded(child.argv, child.grace_seconds),
                env=child_environment(child.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run.started_at = time.monotonic()
        run.num_starts += 1
        run.state, run.progress = ChildState.STARTING, None
        if run.num_starts == 1:
            self.say(child.name, f"starting; log: {run.log_path}")

    def _handle_taken_port(self, run: _ChildRun, port: int) -> None:
        """Give up, or, before a restart, give what is left of the child a moment to release its port."""
        now = time.monotonic()
        if run.num_starts > 0 and now < run.start_again_at + PORT_RELEASE_SECONDS:
            run.state = ChildState.BACKING_OFF
            return
        self._give_up(run, f"cannot start: another process listens on port {port}; stop it, or choose another port")

    def _check(self, run: _ChildRun, before: Sequence[_ChildRun]) -> None:
        code = run.process.poll() if run.process is not None else None
        if code is not None:
            self._handle_exit(run, code)
        elif run.state is ChildState.STARTING:
            if is_ready(run.child.ready) and self._owns_its_port(run):
                run.state, run.progress = ChildState.READY, None
                self.say(run.child.name, f"ready after {time.monotonic() - run.started_at:.1f} s")
            elif all(each.state is ChildState.READY for each in before):
                self._wait_for(run)

    def _wait_for(self, run: _ChildRun) -> None:
        """Wait for a child that starts as long as it makes progress, and say what it does."""
        assert run.process is not None, "it starts"
        if run.progress is None:
            run.progress = Progress(run.log_path, run.log_start)
            run.reported_at = run.progress.since
        run.progress.look(run.process.pid)
        if (problem := run.progress.problem(run.child.start_seconds)) is not None:
            self._give_up(run, problem)
        elif (now := time.monotonic()) - run.reported_at > self._report_seconds:
            run.reported_at = now
            self.say(run.child.name, f"starting for {now - run.started_at:.0f} s: {run.progress.describe()}")

    def _owns_its_port(self, run: _ChildRun) -> bool:
        if run.child.port is None or run.process is None:
            return True
        return ports.session_listens(run.process.pid, run.child.port)

    def _handle_exit(self, run: _ChildRun, code: int) -> None:
        lived = time.monotonic() - run.started_at
        if run.is_asked_to_end:
            run.is_asked_to_end, run.state, run.start_again_at = False, ChildState.BACKING_OFF, time.monotonic()
            self.say(run.child.name, "stopped; starting it again")
            return
        if code == PERMANENT_STATUS:
            self._give_up(run, "cannot start")
            return
        before = run.error
        # A process that was killed wrote no error: what its log has is a warning or an older one.
        run.error = None if code in KILLED else last_error(run.log_path, start=run.log_start)
        is_alike = lived < self._alike_seconds and _is_same_error(run.error, before)
        is_quick = is_alike or lived < self._quick_seconds or run.state is ChildState.STARTING
        run.num_quick_deaths = run.num_quick_deaths + 1 if is_quick else 1
        if run.num_quick_deaths >= self._max_quick_deaths and is_quick:
            self._give_up(run, f"died {run.num_quick_deaths} times in a row, last with {describe_exit(code)}")
            return
        delay = min(self._first_delay_seconds * 2 ** (run.num_quick_deaths - 1), 30.0)
        run.state = ChildState.BACKING_OFF
        run.start_again_at = time.monotonic() + delay
        self.say(run.child.name, f"died with {describe_exit(code)} after {lived:.1f} s; restarting it in {delay:.1f} s")
        if run.error is not None:
            self.say(run.child.name, f"its last error: {run.error}")

    def _give_up(self, run: _ChildRun, why: str) -> None:
        run.state = ChildState.FAILED
        if run.num_starts == 0:
            self.failure = f"{run.child.name} {why}"
            return
        tail = tail_of(run.log_path, start=run.log_start)
        self.failure = f"{run.child.name} {why}; the end of its log {run.log_path}:\n{tail}"

    def _stop(self, run: _ChildRun) -> None:
        process = run.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(run.child.grace_seconds + 5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.say(run.child.name, "stopped")
        if run.state is not ChildState.FAILED:
            run.state = ChildState.STOPPED


def is_ready(ready: str | Callable[[], bool] | None) -> bool:
    if ready is None:
        return True
    if callable(ready):
        return ready()
    # An HTTP proxy in the environment must not come between a supervisor and its children.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(ready, timeout=_PROBE_SECONDS) as response:
            return bool(response.status == HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False


def describe_exit(code: int) -> str:
    number = -code if code < 0 else code - 128
    if number > 0 and number in set(signal.Signals):
        return f"signal {signal.Signals(number).name}"
    return f"exit status {code}"


def tail_of(path: Path, num_lines: int = 20, start: int = 0) -> str:
    with path.open("rb") as log:
        lines = deque(_lines_near_end(log, start), maxlen=num_lines)
    return "\n".join(f"    {line.decode(errors='replace').rstrip()}" for line in lines) or "    (empty)"


def last_error(path: Path, start: int = 0) -> str | None:
    """Return the last line of a log that names an error, with the line below it where that has the reason."""
    with path.open("rb") as log:
        lines = [line.decode(errors="replace").strip() for line in _lines_near_end(log, start)]
    for position in range(len(lines) - 1, -1, -1):
        if (found := _ERROR_LINE.search(lines[position])) is not None:
            reason = lines[position + 1] if "validation error" in found[0] and position + 1 < len(lines) else ""
            return f"{found[0]} {reason}".strip()[:MAX_ERROR_CHARACTERS]
    return None


def _is_same_error(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and _NUMBER.sub("", one) == _NUMBER.sub("", other)


def _lines_near_end(log: BinaryIO, start: int, num_bytes: int = 64 * 1024) -> list[bytes]:
    log.seek(0, os.SEEK_END)
    log.seek(max(start, log.tell() - num_bytes))
    return log.readlines()
