"""Group commit against a store that refuses, locks and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time

import pytest

from proxy.metrics import Metrics
from proxy.writer import Writer
from turnwise.errors import NotFound, StoreError, StoreUnavailable
from turnwise.store import ledger, queries
from turnwise.store.database import Database
from turnwise.types import Session, Turn


@contextlib.asynccontextmanager
async def writing(database: Database, *, seconds: float = 5.0):
    writer = Writer(database, Metrics(), timeout_seconds=seconds)
    try:
        yield writer
    finally:
        await writer.close()


def turn(turn_id: str, session_id: str = "s") -> Turn:
    return Turn(turn_id=turn_id, session_id=session_id, chain_id=turn_id)


def stored(database: Database) -> list[str]:
    with database.read() as connection:
        return [view.turn.turn_id for view in queries.turns(connection, "default", "s")[0]]


def test_one_refused_job_takes_nothing_with_it(database):
    """All arrive at once; the turn of an unknown session fails alone, so does the job that raises."""

    async def run() -> list[object]:
        async with writing(database) as writer:
            await writer.do(lambda connection: ledger.create_session(connection, Session(session_id="s")))
            return await asyncio.gather(
                writer.append([turn("a")]),
                writer.append([turn("b", session_id="nobody's")]),
                writer.do(lambda _: 1 / 0),
                writer.do(lambda connection: ledger.end_session(connection, "default", "none")),
                writer.append([turn("c")]),
                return_exceptions=True,
            )

    a, b, raised, refused, c = asyncio.run(run())
    assert [type(b), type(raised), type(refused)] == [NotFound, StoreError, NotFound]
    assert (a[0].turn_id, c[0].turn_id) == ("a", "c")
    assert sorted(stored(database)) == ["a", "c"]


def test_a_cancelled_caller_does_not_stop_the_others(database):
    async def run() -> None:
        async with writing(database) as writer:
            await writer.do(lambda connection: ledger.create_session(connection, Session(session_id="s")))
            gone = asyncio.ensure_future(writer.append([turn("gone")]))
            await asyncio.sleep(0)
            gone.cancel()
            await writer.append([turn("kept")])

    asyncio.run(run())
    assert "kept" in stored(database)


@pytest.fixture
def locked(tmp_path, sqlite_template):
    """A SQLite database, and the connection that holds its lock."""
    path = tmp_path / "locked.db"
    path.write_bytes(sqlite_template.read_bytes())
    database = Database(f"sqlite:///{path}", lock_timeout_seconds=0.05)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as holder:
        with database.write() as connection:
            ledger.create_session(connection, Session(session_id="s"))
        holder.execute("BEGIN IMMEDIATE")
        yield database, holder
    database.close()


def test_a_locked_store_is_waited_for(locked):
    database, holder = locked

    async def run() -> list[list[Turn]]:
        async with writing(database) as writer:
            calls = [asyncio.ensure_future(writer.append([turn(f"t{number}")])) for number in range(3)]
            threading.Timer(0.3, holder.rollback).start()
            return await asyncio.gather(*calls)

    assert len(asyncio.run(run())) == 3
    assert len(stored(database)) == 3


def test_a_store_that_stays_locked_is_told_to_all_at_their_deadline_and_not_one_after_the_other(locked):
    """Twenty callers, half a second each: one waits no longer than the other. Nothing of theirs is stored later."""
    database, holder = locked

    async def run() -> list[object]:
        async with writing(database, seconds=0.5) as writer:
            calls = [writer.append([turn(f"t{number}")]) for number in range(20)]
            return await asyncio.gather(*calls, return_exceptions=True)

    started = time.monotonic()
    answers = asyncio.run(run())
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert time.monotonic() - started < 3.0
    holder.rollback()
    assert stored(database) == []
