"""Group commit against a store that refuses, is locked and recovers."""

import asyncio
import contextlib
import math
import operator
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from support.migrated import migrated
from support.proxies import children
from support.waiting import WAIT_SECONDS, wait_until

from proxy.metrics import Metrics
from proxy.settings import ProxySettings
from proxy.writer import client
from proxy.writer.client import Writer, row_of
from proxy.writer.frames import Link, frame
from proxy.writer.process import BatchReport, Job, NewTurn, Setup, Work
from turnwise.errors import NotFound, StoreError, StoreUnavailable
from turnwise.store import sessions, turns
from turnwise.store.database import Connection, Database
from turnwise.types import Outcome, Session

SESSION = Session(session_id="s")


@contextlib.asynccontextmanager
async def writing(url: str, *, seconds: float = WAIT_SECONDS, metrics: Metrics | None = None):
    writer = Writer(ProxySettings(database=url, commit_timeout_seconds=seconds), metrics or Metrics())
    await writer.start()
    try:
        yield writer
    finally:
        await writer.close()


def turn(turn_id: str, session_id: str = "s", **known) -> NewTurn:
    known = {"session_created_at": SESSION.created_at, **known}
    return NewTurn(turn_id=turn_id, session_id=session_id, chain_id=turn_id, **known)


def stopping(connection: Connection) -> None:
    del connection
    raise ZeroDivisionError


def pid_of_writer(connection: Connection) -> int:
    del connection
    return os.getpid()


def stored(database: Database) -> list[str]:
    with database.read() as connection:
        return [view.turn.turn_id for view in turns.read_turns(connection, "default", "s")[0]]


def test_a_refused_job_does_not_fail_the_others_of_its_commit(database, database_url):
    async def run() -> list[object]:
        async with writing(database_url) as writer:
            await writer.do(sessions.create_session, SESSION)
            return await asyncio.gather(
                writer.append([turn("a")]),
                writer.append([turn("b", session_id="nobody's")]),
                writer.do(stopping),
                writer.do(sessions.end_session, "default", "none"),
                writer.append([turn("c")]),
                return_exceptions=True,
            )

    a, b, raised, refused, c = asyncio.run(run())
    assert [type(b), type(raised), type(refused)] == [NotFound, StoreError, NotFound]
    assert (a, c) == (True, True)
    assert sorted(stored(database)) == ["a", "c"]


def test_an_id_of_a_prompt_that_is_no_token_id_is_not_stored(database, database_url):
    """2**31 is the smallest number that a stored id cannot be; the largest id is stored."""

    async def run() -> list[object]:
        async with writing(database_url) as writer:
            await writer.open(SESSION)
            prompts = [b"1,2147483647", b"1,2147483648"]
            jobs = [writer.append([turn(f"t{i}", encoded_prompt=ids)]) for i, ids in enumerate(prompts)]
            return await asyncio.gather(*jobs, return_exceptions=True)

    _, refused = asyncio.run(run())
    assert isinstance(refused, StoreError)
    with database.read() as connection:
        [view] = turns.read_turns(connection, "default", "s")[0]
    assert view.turn.prompt_delta.tolist() == [1, 2**31 - 1]


@pytest.fixture
def locked(tmp_path):
    path = tmp_path / "locked.db"
    database = Database(migrated(f"sqlite:///{path}"), lock_timeout_seconds=0.05)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as holder:
        with database.write() as connection:
            sessions.create_session(connection, SESSION)
        holder.execute("BEGIN IMMEDIATE")
        yield database, f"sqlite:///{path}", holder
    database.close()


async def test_a_turn_that_could_not_be_stored_is_reported_until_another_one_is(locked, monkeypatch):
    """A full disk refuses turns and opens transactions: the check of readiness, which stores nothing, passed."""
    _, url, holder = locked
    monkeypatch.setattr(client, "ANSWER_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(client, "FAILED_SECONDS", WAIT_SECONDS)
    async with writing(url, seconds=1.0) as writer:
        with pytest.raises(StoreUnavailable):
            await writer.append([turn("a")])
        holder.rollback()
        with pytest.raises(StoreUnavailable, match=r"the last turn could not be stored: .*lock"):
            await writer.check()
        monkeypatch.setattr(client, "FAILED_SECONDS", 0.0)
        await writer.check()
        monkeypatch.setattr(client, "FAILED_SECONDS", WAIT_SECONDS)
        writer._timeout_seconds = WAIT_SECONDS
        await writer.append([turn("b")])
        await writer.check()


async def test_the_check_names_what_the_writing_process_waits_for(locked, monkeypatch):
    """A batch is tried again until its deadline, and the check waits behind it."""
    _, url, holder = locked
    monkeypatch.setattr(client, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.0)
    async with writing(url) as writer, asyncio.timeout(WAIT_SECONDS):
        waiting, said = asyncio.ensure_future(writer.append([turn("a")])), ""
        while "has not answered for 1 s: the database failed (OperationalError: database is locked" not in said:
            with pytest.raises(StoreUnavailable, match="has not answered") as unavailable:  # it starts first
                await writer.check()
            said = str(unavailable.value)
        holder.rollback()
        monkeypatch.setattr(client, "ANSWER_SECONDS", WAIT_SECONDS)
        await waiting
        await writer.check()


def test_all_callers_of_a_store_that_stays_locked_fail_at_their_own_deadline(locked):
    """They wait concurrently: one after the other would take half an hour. None of their jobs is stored later."""
    database, url, holder = locked

    async def run() -> list[object]:
        async with writing(url, seconds=0.5) as writer:
            with pytest.raises(StoreUnavailable):  # the process has started by then; this is slow on a busy machine
                await writer.do(pid_of_writer)
            calls = [writer.append([turn(f"t{number}")]) for number in range(3600)]
            async with asyncio.timeout(WAIT_SECONDS):
                return await asyncio.gather(*calls, return_exceptions=True)

    assert {type(answer) for answer in asyncio.run(run())} == {StoreUnavailable}
    holder.rollback()
    assert stored(database) == []


async def test_a_turn_stores_the_engines_logprobs_and_is_untrainable_if_some_are_missing(database, database_url):
    """The logprobs come in the pieces of a stream; a turn without tokens needs none."""
    two = np.array([5, 6], np.int32)
    pieces = [b'{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]}]}', b"null"]
    other = b'{"content":[{"token":"\\"b","logprob":-1.25}]}'

    appended = [
        turn("whole", token_ids=two, encoded_logprobs=[*pieces, other]),
        turn("short", token_ids=two, encoded_logprobs=pieces),
        turn("b", token_ids=two, encoded_logprobs=[*pieces, b"{"]),
        turn("none", outcome=Outcome.ERROR, reason="engine_500"),
    ]
    async with writing(database_url) as writer:
        await writer.do(sessions.create_session, SESSION)
        assert all([await writer.append([each]) for each in appended])
    assert [(each.outcome, each.reason, each.chain_id) for each in appended] == [
        (Outcome.EXACT, None, "whole"),
        (Outcome.UNTRAINABLE, "no_logprobs", "short"),
        (Outcome.UNTRAINABLE, "no_logprobs", "b"),
        (Outcome.ERROR, "engine_500", "none"),
    ]
    with database.read() as connection:
        views, _ = turns.read_turns(connection, "default", "s")
    assert [view.turn.logprobs.tolist() for view in views] == [[-0.5, -1.25], [-0.5], [], []]


@contextlib.contextmanager
def written_by_a_shell():
    """A writing process that a shell has started in place of a proxy: the link to it, and the shell."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            program = f"'{sys.executable}' -c 'from proxy.writer.process import main; main()' {theirs.fileno()} & wait"
            proxy = subprocess.Popen(["sh", "-c", program], pass_fds=[theirs.fileno()])
        try:
            yield ours, proxy
        finally:
            proxy.kill()
            proxy.wait()


def test_the_queued_jobs_of_a_killed_proxy_are_not_committed(locked):
    """Another proxy may have sampled the same call again."""
    database, url, holder = locked
    with written_by_a_shell() as (ours, proxy):
        late = tuple(Job(0, time.monotonic(), [row_of(turn("late"))]))
        ours.sendall(b"".join([*frame(Setup(url, 0.1, None, proxy.pid)), *frame(late)]))
        assert type(receive(ours).results[0]) is StoreUnavailable
        ours.sendall(b"".join(frame(tuple(Job(1, time.monotonic() + 60, [row_of(turn("left"))])))))
        proxy.kill()
        proxy.wait()
        holder.rollback()
        ours.settimeout(WAIT_SECONDS)
        assert ours.recv(1) == b""
    assert stored(database) == []


A_SECOND = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < 5000000) SELECT max(n) FROM c"


def test_the_open_transaction_of_a_killed_proxy_is_not_committed(locked):
    """The writing process is stopped inside the transaction, and goes on after its proxy has ended."""
    database, url, holder = locked
    holder.rollback()
    holder.execute("PRAGMA busy_timeout = 0")
    with written_by_a_shell() as (ours, proxy):
        slow = Work(operator.methodcaller("exec_driver_sql", A_SECOND), (), {})
        jobs = [Job(0, math.inf, slow), Job(1, math.inf, [row_of(turn("left"))])]
        ours.sendall(
            b"".join([*frame(Setup(url, 60.0, None, proxy.pid)), *(b"".join(frame(tuple(job))) for job in jobs)])
        )
        wait_until(lambda: is_locked(holder), "the writing process opens a transaction")
        (writer,) = children(proxy.pid)
        os.kill(writer, signal.SIGSTOP)
        assert is_locked(holder)
        proxy.kill()
        proxy.wait()
        os.kill(writer, signal.SIGCONT)
        ours.settimeout(WAIT_SECONDS)
        while ours.recv(1 << 16):
            pass
    assert stored(database) == []


def is_locked(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return True
    connection.rollback()
    return False


def receive(link: socket.socket) -> BatchReport:
    found: list[BatchReport] = []
    frames = Link(lambda fields: found.append(BatchReport(*fields)))
    while not any(report.results for report in found):
        frames.data_received(link.recv(1 << 16))
    return next(report for report in found if report.results)
