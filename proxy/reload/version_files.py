"""Reads of versions' files, which may take as long as a large checkpoint or a slow file system needs.

A read runs in a separate daemon thread, so one that never ends blocks neither the event loop nor the exit of the
process. Callers wait for a limited time and ask again later: the read goes on meanwhile, and no second one of the same
files starts beside it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from turnwise.errors import BadCheckpoint, FilesNotRead, ReloadFailed
from turnwise.processes.limited import call_in_daemon_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_SECONDS = 1.0
"""How long a caller waits for a read before it does its other work; the read goes on."""
LONG_SECONDS = 60.0
"""How often a read that goes on is logged, and how long its result is kept for a caller that asks again."""
RETRY_SECONDS = 5.0
"""How long after an error of `NO_ANSWER` files are read again."""
NO_ANSWER = frozenset(
    {errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN}
)
"""Errors of a network file system whose server does not answer; they say nothing about the files."""
WRONG_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
)
"""Errors that a file gives at each read; others, such as EIO or too many open files, may pass."""


class _Reading:
    """One read, and its result once it has ended."""

    def __init__(self, path: str, read: Callable[[], Any]) -> None:
        self.path = path
        self.ended = asyncio.Event()
        self.started_at = self.logged_at = time.monotonic()
        self.outdated_at = math.inf
        """When another read is to start, on the monotonic clock: some time after this one has ended."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.read_error: OSError | None = None
        """The error of the system that ended the read, also as the cause of a `BadCheckpoint`; None without one."""
        call_in_daemon_thread("version-files", read, self._end)

    @property
    def has_no_answer(self) -> bool:
        return self.read_error is not None and self.read_error.errno in NO_ANSWER

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        cause = error.__cause__ if isinstance(error, BadCheckpoint) else error
        self.read_error = cause if isinstance(cause, OSError) else None
        self.outdated_at = time.monotonic() + (RETRY_SECONDS if self.has_no_answer else LONG_SECONDS)
        self.ended.set()
        if self.has_no_answer:
            log.warning("the file system of %r does not answer, trying again: %s", self.path, self.read_error)


class VersionFiles:
    """Reads versions' files, each once at a time."""

    def __init__(self) -> None:
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
        """Return what a function reads in a directory.

        Args:
            key: What it reads; a second call with the same key waits for the same read.
            path: The directory.
            read: The function, called in a thread.
            seconds: How long to wait for it; None waits without a limit.

        Raises:
            FilesNotRead: It goes on, or the file system does not answer; call again.
            ReloadFailed: A file could not be read, which may pass.
            Exception: What `read` raised, such as BadCheckpoint (a file is missing or wrong) or Conflict.
        """
        reading = self._readings.get(key)
        if reading is None or time.monotonic() >= reading.outdated_at:
            self._drop_outdated()
            reading = self._readings[key] = _Reading(path, read)
        try:
            async with asyncio.timeout(seconds):
                await reading.ended.wait()
        except TimeoutError as error:
            raise FilesNotRead(_noted(reading)) from error
        if reading.has_no_answer:
            raise FilesNotRead(f"the file system of {path!r} does not answer: {reading.read_error}") from reading.error
        self._readings.pop(key, None)
        failed = reading.read_error
        if failed is not None and (failed is reading.error or failed.errno not in WRONG_FILE):
            raise ReloadFailed(f"a file in {path!r} could not be read: {failed}", is_transient=True) from reading.error
        if reading.error is not None:
            raise reading.error
        result: T = reading.result
        return result

    def _drop_outdated(self) -> None:
        now = time.monotonic()
        self._readings = {key: reading for key, reading in self._readings.items() if now < reading.outdated_at}


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
