"""How long a read of a version's files is waited for: the reads are those of one child process, and go on there.

A read that never ends blocks neither the event loop nor the exit of the process. Callers wait for a limited time and
ask again later: the read goes on, and no second one starts beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from proxy.writer.frames import Link, frame
from turnwise.errors import BadCheckpoint, FilesNotRead, ReloadFailed

T = TypeVar("T")
log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0
"""How long a caller waits for a read before it does its other work; the read goes on."""
LONG_SECONDS = 60.0
"""How often a read that goes on is logged, and how long its result is kept for a caller that asks again."""
RETRY_SECONDS = 5.0
"""How long after an error of `NO_ANSWER` files are read again."""
END_SECONDS = 1.0
"""How long a killed child is waited for; one that a device does not let go stays until the device answers."""
NO_ANSWER = frozenset(
    {errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN}
)
"""Errors of a network file system whose server does not answer; they say nothing about the files."""
WRONG_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
)
"""Errors that a file gives at each read; others, such as EIO or too many open files, may pass."""
Finish = Callable[[Any, BaseException | None, OSError | None], None]
"""Gets the result of a read, what it raised, and the error of the system behind that."""


class ReadingProcess:
    """The child process that reads; it is started by the first read, and again after one in which it ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[int, Finish] = {}
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            OSError: the system has no resources for it.
        """
        async with self._starting:
            if self._transport is not None:
                return
            ours, theirs = socket.socketpair()
            with theirs, contextlib.ExitStack() as undo:
                undo.enter_context(ours)
                program = "from proxy.reload.reading_process import main; main()"
                argv = [sys.executable, "-c", program, str(theirs.fileno())]
                self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])  # noqa: ASYNC220, S603  our own
                undo.pop_all()
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: Link(self._take, self._lost), sock=ours)

    async def ask(self, read: Callable[[], Any], finish: Finish) -> None:
        """Let the process call a function, which is sent by its module and name; `finish` gets what comes of it."""
        await self.start()
        number = next(self._numbers)
        request = frame((number, read))
        self._waiting[number] = finish
        assert self._transport is not None
        self._transport.writelines(request)

    def close(self) -> None:
        """End the process, whatever it reads."""
        if self._transport is not None:
            self._waiting.clear()
            self._transport.abort()
            self._end_process()

    def _take(self, answer: tuple[int, Any, BaseException | None, OSError | None]) -> None:
        number, *outcome = answer
        if (finish := self._waiting.pop(number, None)) is not None:
            finish(*outcome)

    def _lost(self) -> None:
        """Fail the reads of a process that ended; each may be the one that ended it, so they are tried again."""
        self._end_process()
        for finish in [self._waiting.pop(number) for number in list(self._waiting)]:
            problem = "the process that read its files ended: a file became shorter, or its file system failed"
            finish(None, ReloadFailed(problem, is_transient=True), None)

    def _end_process(self) -> None:
        self._transport = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)


class _Reading:
    """One read, and its result once it has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ended = asyncio.Event()
        self.started_at = self.logged_at = time.monotonic()
        self.outdated_at = math.inf
        """When another read is to start, on the monotonic clock: some time after this one has ended."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.read_error: OSError | None = None

    @property
    def has_no_answer(self) -> bool:
        return self.read_error is not None and self.read_error.errno in NO_ANSWER

    def end(self, result: Any, error: BaseException | None, read_error: OSError | None) -> None:
        self.result, self.error, self.read_error = result, error, read_error
        self.outdated_at = time.monotonic() + (RETRY_SECONDS if self.has_no_answer else LONG_SECONDS)
        self.ended.set()
        if self.has_no_answer:
            log.warning("the file system of %r does not answer, trying again: %s", self.path, read_error)


class VersionFiles:
    """Reads versions' files, each once at a time."""

    def __init__(self, process: ReadingProcess) -> None:
        self._process = process
        self._readings: dict[tuple[str, ...], _Reading] = {}
        """Running reads, and finished ones whose result was not fetched yet; keyed by what they read."""

    @property
    def problem(self) -> str | None:
        """Which files take long to read; None if none do."""
        for reading in self._readings.values():
            seconds = time.monotonic() - reading.started_at
            if not reading.ended.is_set() and seconds >= LONG_SECONDS:
                return _not_read(reading.path, seconds)
        return None

    def is_reading(self, path: str) -> bool:
        return any(one.path == path and not one.ended.is_set() for one in self._readings.values())

    async def read(self, key: tuple[str, ...], path: str, read: Callable[[], T], *, seconds: float | None) -> T:
        """Return what a function of a module, or a partial of one, reads in a directory; the child process calls it.

        A second call with the same key waits for the same read. Without `seconds` the wait has no limit.

        Raises:
            FilesNotRead: It goes on, or the file system does not answer; call again.
            ReloadFailed: A file could not be read, which may pass.
            Exception: What `read` raised, such as BadCheckpoint (a file is missing or wrong).
        """
        reading = self._readings.get(key)
        now = time.monotonic()
        if reading is None or now >= reading.outdated_at:
            self._readings = {name: other for name, other in self._readings.items() if now < other.outdated_at}
            reading = self._readings[key] = _Reading(path)
            await self._start(reading, read)
        try:
            async with asyncio.timeout(seconds):
                await reading.ended.wait()
        except TimeoutError as error:
            raise FilesNotRead(_noted(reading)) from error
        if reading.has_no_answer:
            raise FilesNotRead(f"the file system of {path!r} does not answer: {reading.read_error}") from reading.error
        self._readings.pop(key, None)
        result: T = _result_of(reading)
        return result

    async def _start(self, reading: _Reading, read: Callable[[], Any]) -> None:
        try:
            await self._process.ask(read, reading.end)
        except OSError as error:
            problem = f"no process could be started that reads files: {error}"
            reading.end(None, ReloadFailed(problem, is_transient=True), None)


def _result_of(reading: _Reading) -> Any:
    failed, path = reading.read_error, reading.path
    if failed is not None and (not isinstance(reading.error, BadCheckpoint) or failed.errno not in WRONG_FILE):
        raise ReloadFailed(f"a file in {path!r} could not be read: {failed}", is_transient=True) from reading.error
    if reading.error is not None:
        raise reading.error
    return reading.result


def _noted(reading: _Reading) -> str:
    """Return a sentence that a read goes on; log it every `LONG_SECONDS`."""
    now = time.monotonic()
    text = _not_read(reading.path, now - reading.started_at)
    if now - reading.logged_at >= LONG_SECONDS:
        reading.logged_at = now
        log.warning("%s", text)
    return text


def _not_read(path: str, seconds: float) -> str:
    return (
        f"the files in {path!r} have been read for {seconds:.0f} s and are not complete; the engines serve what they "
        "have. If this does not end, check that the file system answers"
    )
