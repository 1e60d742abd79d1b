"""The calls' side of group commit: jobs go to the writing process, and a job's caller waits until it is committed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from proxy.metrics import Metrics
from proxy.writer.process import Ending, Frames, Job, Report, Sampled, Setup, Work, frame
from turnwise.errors import StoreUnavailable
from turnwise.store.database import Connection

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
LOCK_SECONDS = 5.0
"""How long one attempt to write waits for a lock, unless its jobs have less time."""
RESTART_SECONDS = 0.2
"""Pause before a writing process that died is replaced."""


class Writer:
    """The one writer of a proxy."""

    def __init__(self, url: str, metrics: Metrics, *, timeout_seconds: float, fault: str | None = None) -> None:
        self._setup = Setup(url, min(LOCK_SECONDS, timeout_seconds), fault, os.getpid())
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Start the writing process; jobs may be given to it at once.

        Raises:
            OSError: the system has no room for it.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            # Not `-m`: what the process sends must be pickled under the name of its module, not of a program.
            argv = [sys.executable, "-c", "from proxy.writer.process import main; main()", str(theirs.fileno())]
            self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])  # noqa: ASYNC220, S603  a fork of our own
            undo.pop_all()
        self._transport, _ = await loop.create_unix_connection(lambda: _Link(self), sock=ours)
        self._transport.writelines(frame(self._setup))

    async def append(self, sampled: list[Sampled]) -> list[Ending]:
        """Store the turns of one call and return how each is stored.

        Raises:
            StoreUnavailable: when they could not be committed in time; nothing of them is stored.
            NotFound: when the session does not exist.
        """
        endings: list[Ending] = await self._submit(sampled)
        return endings

    async def do(self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a function of the store inside the next transaction, and return its result once that is committed.

        Raises:
            StoreUnavailable: when it could not be committed in time.
            TurnwiseError: what the function raises.
        """
        result: T = await self._submit(Work(function, arguments, options))
        return result

    async def close(self) -> None:
        """Write what is queued, then stop."""
        self._is_closing = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self._transport is not None:
            self._flush()
            self._transport.write_eof()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    def _submit(self, work: list[Sampled] | Work) -> asyncio.Future[Any]:
        if self._transport is None:
            raise StoreUnavailable("the writing process is being restarted; nothing of this is stored, retry")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        if not self._outgoing:
            loop.call_soon(self._flush)
        self._outgoing += frame(Job(number, time.monotonic() + self._timeout_seconds, work))
        future = self._waiting[number] = loop.create_future()
        return future

    def _flush(self) -> None:
        """Send all jobs of one round of the event loop at once."""
        jobs, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.writelines(jobs)

    def take(self, report: Report) -> None:
        """Tell the callers what became of their jobs."""
        metrics = self._metrics
        metrics.commit_seconds.observe(report.seconds)
        metrics.commit_batch.observe(len(report.results))
        if report.num_retries:
            metrics.retries.labels("commit").inc(report.num_retries)
        if report.num_errors:
            metrics.background_errors.labels("writer").inc(report.num_errors)
        for number, result in report.results.items():
            future = self._waiting.pop(number)
            if future.cancelled():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def lost(self) -> None:
        """Fail what the writing process left behind, and replace it, unless this is the end."""
        self._transport = None
        waiting, self._waiting, self._outgoing = self._waiting, {}, []
        for future in waiting.values():
            if not future.done():
                future.set_exception(
                    StoreUnavailable("the writing process died; whether this was stored is not known, retry")
                )
        if not self._is_closing:
            log.error("the writing process died; another is started")
            self._metrics.background_errors.labels("writer").inc()
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        """Start another, as soon as the old one is gone for good and the system has room for it."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        while self._transport is None:
            await asyncio.sleep(RESTART_SECONDS)
            try:
                await self.start()
            except OSError as error:
                log.warning("no writing process could be started: %s", error)
                self._metrics.background_errors.labels("writer").inc()


class _Link(asyncio.Protocol):
    """The socket to the writing process."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for report in self._frames.feed(data):
            self._writer.take(report)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        self._writer.lost()
