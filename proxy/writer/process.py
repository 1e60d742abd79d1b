"""The process that commits turns: one transaction for all waiting jobs; features may change the turns here.

A turn's reply leaves after its commit, so commits must be cheap: they are batched, and neither the statements nor the
decoding of logprobs takes the interpreter from the calls. Jobs of the control plane run in the same transaction, each
in a savepoint, so that a rejected job affects no other. The process ends with its proxy. It commits nothing for a proxy
that was killed: by then another proxy may have sampled the same call again.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import datetime
import gc
import importlib
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from proxy.dialects.logprobs import IMPOSSIBLE, read_logprobs
from proxy.fault import FaultPoints
from proxy.writer.frames import Link, frame
from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.errors import StoreError, StoreUnavailable, TurnwiseError
from turnwise.parts import PartProblem, known
from turnwise.store import database as stored_database
from turnwise.store import rewards, sessions, turns
from turnwise.store.database import Connection, Database
from turnwise.telemetry.logs import LogFormat, configure_logging
from turnwise.types import Outcome, Reward, Session, Turn

log = logging.getLogger(__name__)
MAX_BATCH = 256
RETRY_SECONDS = 0.05
"""Pause before a transaction is tried again while the store is locked or unreachable."""
PROGRESS_SECONDS = 0.5
"""How often a transaction of many jobs reports that it goes on."""
READ_BYTES = 1 << 20
GC_ALLOCATIONS = 50_000
"""Allocations between two garbage collections: decoding one reply makes thousands of objects without cycles."""
MAX_ID = 2**31 - 1
TOKEN_BYTES = 4


MakeRowStep: TypeAlias = Callable[[], Callable[[turns.TurnRow], turns.TurnRow]]
"""Importable by its name."""


class Setup(NamedTuple):
    """The first message to the process."""

    url: str
    lock_seconds: float
    """How long one attempt waits for a lock."""
    fault: str | None
    """Fault point at which to kill the process, for tests."""
    proxy_pid: int
    """Process id of the proxy that started it."""
    log_format: LogFormat = "text"
    row_steps: tuple[MakeRowStep, ...] = ()
    """Each makes what changes the rows of turns before they are stored."""
    imports: tuple[str, ...] = ()
    """Modules to import before the store is opened: they extend it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class NewTurn(Turn):
    """A turn as capture builds it. The engine's JSON of its long values is decoded by the writing process alone."""

    session_created_at: datetime.datetime
    """Of the call's session: another one of its name, created after it was deleted, does not get the turn."""
    encoded_logprobs: list[bytes] = dataclasses.field(default_factory=list)
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the writing process packs as parts, by their names; those that capture has packed are in `parts`."""
    problems: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why it is stored without parts that were given, by their names; set once it is stored."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What features add to its row, for what follows its append (`turnwise.store.extensions`)."""
    encoded_prompt: bytes = b""
    """`prompt_delta` as decimal numbers, separated by commas; empty where the turn has it already."""


class Work(NamedTuple):
    """A function to call with the open transaction."""

    function: Callable[..., Any]
    """Takes the connection first; importable by its name."""
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class Job(NamedTuple):
    """One unit of writing; it is sent as a plain tuple."""

    number: int
    deadline: float
    """On the monotonic clock, which all processes of a machine share; seconds."""
    work: list[turns.TurnRow] | Session | Work
    """Turns to append, a session to open, or anything else."""


class BatchReport(NamedTuple):
    """The results of one batch; it is sent as a plain tuple."""

    results: dict[int, Any]
    """By the jobs' numbers: a value, or an exception to raise. For appended turns what `_stored` returns of each."""
    num_retries: int
    num_errors: int
    """Unexpected failures; the log has the tracebacks."""
    num_lost_log_lines: int = 0
    """Lines of this process's log that were lost since the last report."""
    problem: str | None = None
    """Why nothing can be written at present; only of a report without results."""


def complete(sent: turns.TurnRow) -> turns.TurnRow:
    """Return a row with its prompt and logprobs decoded and its parts packed; untrainable where a logprob is missing.

    The row that was sent stays as it is, because a transaction that fails is tried again.
    """
    row, logprobs = sent.copy(), read_logprobs([sent["encoded_logprobs"]])
    try:
        row["logprobs"] = array.array("f", cast("list[float]", logprobs)).tobytes()
        is_complete = len(row["logprobs"]) == len(row["token_ids"])
        is_possible = min(cast("list[float]", logprobs), default=0.0) > IMPOSSIBLE
    except TypeError:  # some are null
        row["logprobs"] = np.array(logprobs, np.float32).tobytes()
        is_complete = is_possible = False
    if sent["encoded_prompt"]:
        row["prompt_delta"] = ids_from_text(sent["encoded_prompt"])
    if row["outcome"] in TRAINABLE_OUTCOMES and not is_complete:
        row |= {"outcome": Outcome.UNTRAINABLE.value, "reason": "no_logprobs"}
    elif row["outcome"] in TRAINABLE_OUTCOMES and not is_possible:
        row |= {"outcome": Outcome.UNTRAINABLE.value, "reason": "impossible_logprobs"}
    if sent["given"]:
        row["parts"], row["problems"] = _parts(row)
    return row


def _parts(row: turns.TurnRow) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the parts of a turn in the order in which they are stored, and why it lacks some, by their names."""
    found, given, problems = dict(row["parts"]), row["given"], {}
    for name, part in known.items():
        if name in given:
            try:
                packed = part.pack(given[name], row)
            except PartProblem as problem:
                log.warning("turn %s is stored %s", row["turn_id"], problem)
                problems[name] = problem.reason
            else:
                found |= {} if packed is None else {name: packed}
    return {name: found[name] for name in known if name in found}, problems


def ids_from_text(text: bytes) -> bytes:
    """Return the stored form of ids that are decimal numbers, separated by commas.

    Raises:
        OverflowError: an id is too large for 32 bits.
    """
    ids = np.fromstring(text, np.int64, sep=",")  # the fastest way: no object for each id
    if ids.max(initial=0) > MAX_ID:
        raise OverflowError(f"token id {ids.max()} is larger than {MAX_ID}")
    return ids.astype("<i4").tobytes()


class Committer:
    """Writes batches of jobs."""

    def __init__(
        self,
        database: Database,
        faults: FaultPoints,
        proxy_pid: int,
        link: socket.socket,
        row_steps: Iterable[MakeRowStep] = (),
    ) -> None:
        self._row_steps = [make() for make in row_steps]
        self._database = database
        self._link = link
        self._reported_at = -math.inf
        self._faults = faults
        self._proxy_pid = proxy_pid
        self._num_retries = 0
        self._num_errors = 0

    def write(self, batch: list[Job]) -> BatchReport:
        """Write a batch; return each job's result, or the exception to raise at its caller."""
        self._num_retries = self._num_errors = 0
        results = self._write(batch)
        return BatchReport(results, self._num_retries, self._num_errors)

    def _write(self, batch: list[Job]) -> dict[int, Any]:
        """Write jobs in one transaction, which is tried again while the store is locked or unreachable."""
        results: dict[int, Any] = {}
        while batch:
            self._exit_with_proxy()
            try:
                return results | self._transact(batch)
            except StoreUnavailable as error:
                now = time.monotonic()
                results |= {job.number: error for job in batch if job.deadline <= now}
                batch = [job for job in batch if job.deadline > now]
                if batch:
                    self._num_retries += 1
                    self.note_progress(str(error))
                    time.sleep(RETRY_SECONDS)
            except TurnwiseError as error:
                return results | self._reject(batch, error)
            except Exception as error:  # the process's outermost edge: if the writer ended, every call would fail
                log.exception("a write failed")
                self._num_errors += 1
                return results | self._reject(
                    batch, StoreError(f"the write failed: {error!r}; nothing of it is stored")
                )
        return results

    def _reject(self, batch: list[Job], error: TurnwiseError) -> dict[int, Any]:
        """Give the error to the job that caused it: of several jobs each is written by itself."""
        if len(batch) == 1:
            return {batch[0].number: error}
        return {number: result for job in batch for number, result in self._write([job]).items()}

    def note_progress(self, problem: str | None = None) -> None:
        """Report to the proxy that this process works, or what it waits for, if the last such report is old."""
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_SECONDS:
            self._reported_at = now
            self._link.sendall(b"".join(frame(tuple(BatchReport({}, 0, 0, problem=problem)))))

    def _transact(self, batch: list[Job]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        opens = [(job.number, job.work) for job in batch if isinstance(job.work, Session)]
        appends = {job.number: list(map(self._complete, job.work)) for job in batch if isinstance(job.work, list)}
        with self._database.write() as connection:
            if opens:
                opened = sessions.create_sessions(connection, [session for _, session in opens])
                results |= zip((number for number, _ in opens), opened, strict=True)
            for job in batch:
                if isinstance(job.work, Work):
                    results[job.number] = stored_database.attempt(
                        connection, job.work.function, *job.work.arguments, **job.work.options
                    )
                    self.note_progress()
            if appends:
                results |= _append(connection, appends)
                self._faults.point("in_transaction")
            self._exit_with_proxy()
        return results

    def _complete(self, sent: turns.TurnRow) -> turns.TurnRow:
        row = complete(sent)
        for step in self._row_steps:
            row = step(row)
        return row

    def _exit_with_proxy(self) -> None:
        """Exit at once if the proxy has ended: no client has seen a reply to what is still uncommitted."""
        if os.getppid() != self._proxy_pid:
            for handler in logging.root.handlers:
                handler.flush()  # the log's own waits a bounded time for its thread
            os._exit(0)


def _append(connection: Connection, appends: dict[int, list[turns.TurnRow]]) -> dict[int, list[tuple[Any, ...]]]:
    added = iter(turns.append_rows(connection, list(itertools.chain.from_iterable(appends.values()))))
    return {number: [_stored(connection, row, is_new=next(added)) for row in job] for number, job in appends.items()}


def _stored(connection: Connection, row: turns.TurnRow, *, is_new: bool) -> tuple[Any, ...]:
    """Return id, outcome, reason and chain of the stored turn, and why it lacks parts, by their names.

    The id is another one than the row's if a turn with the same request key was stored first.
    """
    if is_new:
        return row["turn_id"], row["outcome"], row["reason"], row["chain_id"], row.get("problems")
    names = {"turn_id": row["turn_id"], "request_key": row["request_key"]}
    turn = turns.find_turn(connection, row["tenant"], row["session_id"], **names)
    assert turn is not None
    return turn.turn_id, turn.outcome.value, turn.reason, turn.chain_id, None


def _arriving(link: socket.socket) -> Iterator[list[Any]]:
    """Yield all jobs that have arrived, together, until the proxy closes the link."""
    found: list[Any] = []
    frames = Link(found.append)
    while data := link.recv(READ_BYTES):
        frames.data_received(data)
        while found and (data := _receive_available(link)):
            frames.data_received(data)
        if found:
            yield found.copy()
            found.clear()


def _receive_available(link: socket.socket) -> bytes:
    try:
        return link.recv(READ_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def serve(link: socket.socket) -> None:
    """Write the jobs of the proxy at the other end until it closes the link."""
    arriving = _arriving(link)
    first = next(arriving, None)
    if first is None:
        return
    setup, *early = first
    log_handler = configure_logging("warning", setup.log_format)
    for module in setup.imports:
        importlib.import_module(module)
    database = Database(setup.url, pool_size=1, lock_timeout_seconds=setup.lock_seconds)
    faults = FaultPoints(setup.fault, lambda: _kill_both(setup.proxy_pid))
    committer = Committer(database, faults, setup.proxy_pid, link, setup.row_steps)
    committer.note_progress()
    num_lost = 0
    for jobs in itertools.chain([early], arriving):
        for start in range(0, len(jobs), MAX_BATCH):
            report = committer.write([Job(*job) for job in jobs[start : start + MAX_BATCH]])
            if log_handler is not None:
                report = report._replace(num_lost_log_lines=log_handler.num_lost - num_lost)
                num_lost += report.num_lost_log_lines
            link.sendall(b"".join(frame(tuple(report))))
    database.close()


def _kill_both(proxy_pid: int) -> None:
    os.kill(proxy_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def add_pickled(
    connection: Connection,
    pickled: bytes,
    *,
    idempotency_key: str | None,
    body_digest: bytes,
    retrain: bool,
) -> list[int]:
    """Do what `rewards.add_rewards` does with lines that a thread has pickled, because that would hold the loop."""
    lines: list[Reward] = pickle.loads(pickled)  # noqa: S301  from our own process
    return rewards.add_rewards(
        connection, lines, idempotency_key=idempotency_key, body_digest=body_digest, retrain=retrain
    )


def main() -> None:
    """Run as a process: its only argument is the descriptor of the socket to the proxy, which it inherits."""
    # A terminal's ctrl-C reaches the whole group; the queued jobs must be written first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)
    with contextlib.suppress(ConnectionError):  # the proxy was killed
        serve(socket.socket(fileno=int(sys.argv[1])))
