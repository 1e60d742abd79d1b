"""The proxy's side of group commit: sends jobs to the writing process, replaces a dead one, and keeps the last failure.

Every job has a deadline here as well as in the writing process. A writing process that has neither answered a job by
then nor made progress is stopped, or its database is silent: it is killed and replaced, and its jobs fail.
"""

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
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from proxy.metrics import Metrics
from proxy.settings import ProxySettings
from proxy.writer.frames import Link, frame
from proxy.writer.process import BatchReport, Job, MakeRowStep, NewTurn, Setup, Work
from turnwise.errors import StoreUnavailable
from turnwise.store import keys, rows
from turnwise.store import turns as stored_turns
from turnwise.store.database import Connection
from turnwise.telemetry.requests import current_request
from turnwise.types import Outcome, Session

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
LOCK_SECONDS = 5.0
"""How long one attempt to write waits for a lock, unless its jobs have less time."""
RESTART_SECONDS = 0.2
"""Pause before a writing process that ended is replaced."""
GRACE_SECONDS = 2.0
"""How long after a job's deadline the writing process may still report it."""
START_SECONDS = 60.0
"""How long a writing process may take until it can write: on a busy machine, imports take many times as long."""
CHECK_SECONDS = 0.5
"""How often the oldest job is compared with its deadline."""
ANSWER_SECONDS = 5.0
"""How long the readiness check waits for the writing process."""
FAILED_SECONDS = 60.0
"""How long the readiness check reports that a turn could not be stored, unless another one is."""

NO_SPAN: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class _Waiting(NamedTuple):
    """A job without a result yet."""

    future: asyncio.Future[Any]
    submitted_at: float
    """On the monotonic clock."""
    num_turns: int
    """Turns to append; 0 for a job of the control plane."""


class Writer:
    """Writes what calls and their routes store, through one process."""

    def __init__(self, settings: ProxySettings, metrics: Metrics, imports: tuple[str, ...] = ()) -> None:
        url, seconds = settings.database.get_secret_value(), settings.commit_timeout_seconds
        lock_seconds = min(LOCK_SECONDS, seconds)
        self._setup = Setup(url, lock_seconds, settings.fault, os.getpid(), settings.log_format, imports=imports)
        self.row_steps: tuple[MakeRowStep, ...] = ()
        """What features do with the rows of turns in the writing process, set before it starts."""
        self._metrics = metrics
        self._timeout_seconds = seconds
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        """Jobs by their numbers, oldest first."""
        self.slices = asyncio.Lock()
        """Held while one slice of a long change is written: several of them at once delay other writes as one does."""
        self._outgoing: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._restarting: asyncio.Task[None] | None = None
        metrics.compute(metrics.writer_queue, lambda: len(self._waiting))
        self._is_closing = False
        self._reported_at = time.monotonic()
        self._ready_at: float | None = None
        """When the present writing process reported that it can write; None while it starts."""
        self._watch: asyncio.TimerHandle | None = None
        self._failed: tuple[float, StoreUnavailable] | None = None
        """When a turn could not be stored, and why; None once a later one was."""
        self._problem: str | None = None
        """Why the writing process could write nothing when it reported last without results; None if it could."""

    async def start(self) -> None:
        """Start the writing process; it accepts jobs at once.

        Raises:
            OSError: the system has no resources for it.
        """
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            # Not `-m`: objects must be pickled under the name of their module, not `__main__`.
            argv = [sys.executable, "-c", "from proxy.writer.process import main; main()", str(theirs.fileno())]
            self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])  # noqa: ASYNC220, S603  a fork of our own
            undo.pop_all()
        self._transport, _ = await loop.create_unix_connection(lambda: Link(self.take, self.lost), sock=ours)
        self._transport.writelines(frame(self._setup._replace(row_steps=self.row_steps)))
        self._ready_at, self._reported_at = None, time.monotonic()
        if self._watch is None:
            self._watch = loop.call_later(CHECK_SECONDS, self._check_deadline)

    async def append(self, turns: list[NewTurn]) -> bool:
        """Store the turns of one call, and set each one's chain, outcome and reason as it is stored.

        Returns:
            Whether they are stored; not if turns with the same request key were stored first.

        Raises:
            StoreUnavailable: they could not be committed in time; whether they are stored is then not known.
            NotFound: when the session does not exist.
        """
        context, span = current_request.get(), NO_SPAN
        if context is not None and context.trace is not None:
            turn = turns[0]
            named = {
                "turnwise.turn_id": turn.turn_id,
                "turnwise.session_id": turn.session_id,
                "turnwise.tenant": turn.tenant,
            }
            span = context.trace.commit(named)
        with span:
            stored = await self._submit(list(map(row_of, turns)))
        for turn, (_, outcome, reason, chain_id, problems) in zip(turns, stored, strict=True):
            if outcome != turn.outcome:
                turn.outcome = Outcome(outcome)
            turn.reason, turn.chain_id = reason, chain_id
            turn.problems = problems or {}
        first_id: str = stored[0][0]
        return first_id == turns[0].turn_id

    async def open(self, session: Session) -> tuple[Session, bool]:
        """Create a session; return the stored one, and whether this call created it.

        Raises:
            StoreUnavailable: when it could not be committed in time.
            TurnwiseError: why it cannot be created.
        """
        opened: tuple[Session, bool] = await self._submit(session)
        return opened

    async def do(self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a function of the store inside the next transaction, and return its result once that is committed.

        Raises:
            StoreUnavailable: when it could not be committed in time.
            TurnwiseError: what the function raises.
        """
        result: T = await self._submit(Work(function, arguments, options))
        return result

    async def close(self) -> None:
        """Write the queued jobs, then stop the process."""
        self._is_closing = True
        if self._watch is not None:
            self._watch.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
        if self._transport is not None:
            self._flush()
            self._transport.write_eof()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process, self._timeout_seconds + GRACE_SECONDS)

    async def check(self) -> None:
        """Check that the writing process answers and can open a transaction, and that the last turn was stored.

        On a full disk a transaction as small as this one may still succeed, so the last turn of a call counts too.

        Raises:
            StoreUnavailable: it does not, within `ANSWER_SECONDS`, or a turn could not be stored.
        """
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.do(keys.any_keys)
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the writing process has not answered for {ANSWER_SECONDS:g} s: "
                + (self._problem or "check that the database answers")
            ) from error
        if self._failed is not None and time.monotonic() - self._failed[0] < FAILED_SECONDS:
            raise StoreUnavailable(f"the last turn could not be stored: {self._failed[1]}")

    def _submit(self, work: list[stored_turns.TurnRow] | Session | Work) -> asyncio.Future[Any]:
        if self._transport is None:
            raise StoreUnavailable("the writing process is being restarted; nothing of this is stored, retry")
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        if not self._outgoing:
            loop.call_soon(self._flush)
        now = time.monotonic()
        self._outgoing += frame(tuple(Job(number, now + self._timeout_seconds, work)))
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = _Waiting(future, now, len(work) if isinstance(work, list) else 0)
        return future

    def _check_deadline(self) -> None:
        """Fail the jobs that are too old; kill a writing process that makes no progress, which `lost` replaces."""
        self._watch = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._check_deadline)
        now, longest = time.monotonic(), self._timeout_seconds + GRACE_SECONDS
        if self._ready_at is None:
            longest = max(longest, START_SECONDS)
        while self._waiting:
            number, (future, submitted_at, _) = next(iter(self._waiting.items()))
            # Jobs that wait for a process to start have their time from when it can write.
            if now - max(submitted_at, self._ready_at or 0.0) <= longest:
                return
            del self._waiting[number]
            if not future.done():
                future.set_exception(
                    StoreUnavailable(
                        f"the writing process has not committed this within {longest:g} s; whether it was stored is "
                        "not known, retry"
                    )
                )
            if self._process is not None and now - self._reported_at > longest:
                log.error("the writing process has made no progress for %.0f s and is killed", now - self._reported_at)
                self._reported_at = now
                self._process.kill()

    def _flush(self) -> None:
        jobs, self._outgoing = self._outgoing, []
        if self._transport is not None:
            self._transport.writelines(jobs)

    def take(self, fields: tuple[Any, ...]) -> None:
        """Give the callers the results of their jobs, from the fields of a report."""
        report, metrics = BatchReport(*fields), self._metrics
        now = self._reported_at = time.monotonic()
        if self._ready_at is None:
            self._ready_at = now
        self._problem = report.problem
        if not report.results:  # it only says that the process can write, makes progress, or what it waits for
            return
        if any(report[1:]):
            metrics.retries.labels("commit").inc(report.num_retries)
            metrics.background_errors.labels("writer").inc(report.num_errors)
            metrics.lost_log_lines.inc(report.num_lost_log_lines)
        num_committed = 0
        for number, result in report.results.items():
            waiting = self._waiting.pop(number, None)
            if waiting is None:  # its deadline has passed
                continue
            has_failed = isinstance(result, Exception)
            if waiting.num_turns and not has_failed:
                self._failed = None
                num_committed += waiting.num_turns
                metrics.commit_seconds.observe(now - waiting.submitted_at)
            elif waiting.num_turns and isinstance(result, StoreUnavailable):
                self._failed = now, result
            if not waiting.future.cancelled():  # otherwise its caller has left
                (waiting.future.set_exception if has_failed else waiting.future.set_result)(result)
        if num_committed:
            metrics.commit_batch.observe(num_committed)

    def lost(self) -> None:
        """Fail the jobs of a writing process that ended, and replace it unless the proxy is closing."""
        self._transport = None
        waiting, self._waiting, self._outgoing = self._waiting, {}, []
        for future, _, _ in waiting.values():
            if not future.done():
                future.set_exception(
                    StoreUnavailable("the writing process ended; whether this was stored is not known, retry")
                )
        if not self._is_closing:
            log.error("the writing process ended; another is started")
            self._metrics.background_errors.labels("writer").inc()
            self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        """Start another process, once the old one has ended and the system has resources for it."""
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        while self._transport is None:
            await asyncio.sleep(RESTART_SECONDS)
            try:
                await self.start()
            except OSError as error:
                log.warning("no writing process could be started: %s", error)
                self._metrics.background_errors.labels("writer").inc()


def row_of(turn: NewTurn) -> stored_turns.TurnRow:
    """Return the row of a turn as it is sent; `complete` replaces the encoded values."""
    return rows.TURNS.row(
        turn,
        encoded_logprobs=b",".join(turn.encoded_logprobs),
        given=turn.given,
        encoded_prompt=turn.encoded_prompt,
        session_created_at=rows.to_micros(turn.session_created_at),
        **turn.extra,
    )


def _end(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
