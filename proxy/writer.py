"""Group commit: one thread, one transaction for everything that arrived meanwhile.

A turn's reply leaves only after its commit, so the commit must be cheap: while one transaction is on its way to the
disk, the next one fills up. Jobs of the control plane ride along, each in a savepoint of its own, so that one that is
refused takes nothing with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from turnwise.errors import StoreError, StoreUnavailable, TurnwiseError
from turnwise.store import ledger
from turnwise.store.database import Database
from turnwise.types import Turn

if TYPE_CHECKING:
    from turnwise.store.database import Connection

log = logging.getLogger(__name__)
T = TypeVar("T")
BUSY_BATCH = 4
"""Jobs in the last transaction from which on more are expected at once."""
GATHER_SECONDS = 0.002
"""How long a busy writer lets jobs gather, as PostgreSQL's `commit_delay` does: few large transactions cost less."""
RETRY_SECONDS = 0.05
"""Pause before a transaction is tried again while the store is locked or away."""


@dataclasses.dataclass(slots=True)
class Job:
    """One thing to write."""

    work: list[Turn] | Callable[[Connection], Any]
    """Turns to append, or what to do with the open transaction."""
    future: asyncio.Future[Any]
    deadline: float
    """On the monotonic clock, seconds."""
    result: Any = None
    """What the caller gets: a value, or an exception to raise."""


class Writer:
    """The one writer of a proxy process."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        *,
        timeout_seconds: float,
        max_batch: int = 256,
        faults: FaultPoints | None = None,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._max_batch = max_batch
        self._faults = faults or FaultPoints()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._last_batch = 0
        self._thread = threading.Thread(target=self._run, name="turnwise-writer", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def append(self, turns: list[Turn]) -> list[Turn]:
        """Store the turns of one call and return them as stored.

        Raises:
            StoreUnavailable: when they could not be committed in time; nothing of them is stored.
            NotFound: when the session does not exist.
        """
        return cast("list[Turn]", await self._submit(turns))

    async def do(self, work: Callable[[Connection], T]) -> T:
        """Run `work` inside the next transaction and return its result once that is committed."""
        return cast("T", await self._submit(work))

    def _submit(self, work: list[Turn] | Callable[[Connection], Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put(Job(work, future, time.monotonic() + self._timeout_seconds))
        return future

    async def close(self) -> None:
        """Write what is queued, then stop."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            started = time.perf_counter()
            self._write(batch)
            self._metrics.commit_seconds.observe(time.perf_counter() - started)
            self._metrics.commit_batch.observe(len(batch))
            self._loop.call_soon_threadsafe(_resolve, batch)

    def _next_batch(self) -> list[Job] | None:
        first = self._jobs.get()
        if first is None:
            return None
        if self._last_batch >= BUSY_BATCH:
            time.sleep(GATHER_SECONDS)
        batch = [first]
        while len(batch) < self._max_batch:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._jobs.put(None)
                break
            batch.append(job)
        self._last_batch = len(batch)
        return batch

    def _write(self, batch: list[Job]) -> None:
        """Give each job its result, or the exception to raise at its caller."""
        while batch:
            batch = self._try(batch)

    def _try(self, batch: list[Job]) -> list[Job]:
        """Write jobs in one transaction; return those to try again, because the store is locked or away."""
        try:
            self._transact(batch)
        except StoreUnavailable as error:
            return self._wait(batch, error)
        except TurnwiseError as error:
            self._refuse(batch, error)
        except Exception as error:  # the thread's outermost edge: a dead writer would hang every call
            log.exception("a write failed")
            self._metrics.background_errors.labels("writer").inc()
            self._refuse(batch, StoreError(f"the write failed: {error!r}; nothing of it is stored"))
        return []

    def _wait(self, batch: list[Job], error: StoreUnavailable) -> list[Job]:
        """Give up the jobs whose deadline has passed, pause, and return the others."""
        now = time.monotonic()
        for job in batch:
            if job.deadline <= now:
                job.result = error
        waiting = [job for job in batch if job.deadline > now]
        if waiting:
            self._metrics.retries.labels("commit").inc()
            time.sleep(RETRY_SECONDS)
        return waiting

    def _refuse(self, batch: list[Job], error: TurnwiseError) -> None:
        """Give the error to the job that it is about: where there are several, each is written by itself."""
        if len(batch) == 1:
            batch[0].result = error
            return
        for job in batch:
            self._write([job])

    def _transact(self, batch: list[Job]) -> None:
        turns = [turn for job in batch if isinstance(job.work, list) for turn in job.work]
        with self._database.write() as connection:
            results = [None if isinstance(job.work, list) else _attempt(connection, job.work) for job in batch]
            stored = iter(ledger.append_turns(connection, turns) if turns else [])
            if turns:
                self._faults.point("in_transaction")
        for job, result in zip(batch, results, strict=True):
            job.result = [next(stored) for _ in job.work] if isinstance(job.work, list) else result


def _attempt(connection: Connection, work: Callable[[Connection], Any]) -> Any:
    try:
        with connection.begin_nested():
            return work(connection)
    except StoreUnavailable:
        raise
    except TurnwiseError as refusal:
        return refusal


def _resolve(batch: list[Job]) -> None:
    for job in batch:
        if job.future.cancelled():
            continue
        if isinstance(job.result, Exception):
            job.future.set_exception(job.result)
        else:
            job.future.set_result(job.result)
