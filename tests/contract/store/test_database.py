"""The two kinds of transaction, the two errors, and the leases between processes."""

import asyncio
import dataclasses
import datetime
import gc
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from support.full_disk import no_file_over
from support.ledger_samples import add_session
from support.waiting import WAIT_SECONDS

from turnwise.errors import InvalidRequest, SchemaMismatch, SettingsError, StoreUnavailable
from turnwise.features.page import overview
from turnwise.store import schema, sessions
from turnwise.store.database import Database, attempt
from turnwise.store.leases import acquire_lease, renew_lease
from turnwise.types import Session

NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
SECOND = datetime.timedelta(seconds=1)


@pytest.mark.parametrize("url", ["mysql://x/y", "no url", "sqlite://", "sqlite:///:memory:"])
def test_a_database_that_cannot_work_is_refused_with_its_url(url):
    with pytest.raises(SettingsError, match=r"sqlite|not supported"):
        Database(url)


def test_a_write_that_raises_is_rolled_back(database):
    def fail_half_way() -> None:
        with database.write() as connection:
            sessions.create_session(connection, Session(session_id="s"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    with database.read() as connection:
        assert overview.count_rows(connection).sessions == {}


def test_commits_are_durable(database):
    """SQLite: WAL, synchronous = FULL (2) and foreign keys; PostgreSQL: synchronous_commit on."""
    with database.write() as connection:
        if database.dialect == "sqlite":
            ask = ["PRAGMA journal_mode", "PRAGMA synchronous", "PRAGMA foreign_keys"]
            promised = ["wal", 2, 1]
        else:
            ask = ["SHOW synchronous_commit", "SHOW transaction_isolation"]
            promised = ["on", "read committed"]
        assert [connection.exec_driver_sql(sql).scalar_one() for sql in ask] == promised


def test_a_reader_sees_one_snapshot_and_does_not_block_the_writer(database):
    with database.read() as connection:
        assert overview.count_rows(connection).sessions == {}
        add_session(database)
        assert overview.count_rows(connection).sessions == {}
    with database.read() as connection:
        assert overview.count_rows(connection).sessions == {"open": 1}


def test_a_lock_that_is_held_too_long_is_unavailable(database, database_url):
    """Another process locks the row, or the whole file, for longer than this one waits."""
    add_session(database)
    other = Database(database_url, lock_timeout_seconds=0.2)
    try:
        with database.write() as connection:
            connection.execute(sa.update(schema.sessions).values(run=1))
            with pytest.raises(StoreUnavailable, match="lock"), other.write() as blocked:
                blocked.execute(sa.update(schema.sessions).values(run=2))
    finally:
        other.close()


def test_a_writer_that_is_always_at_work_leaves_others_their_turn(tmp_path):
    """It holds SQLite's lock for 50 of 51 ms, as a proxy under load does: SQLite's own waits would miss most pauses."""
    url = f"sqlite:///{tmp_path}/x.db"
    busy, other = (Database(url, lock_timeout_seconds=WAIT_SECONDS) for _ in range(2))
    busy.upgrade()
    is_over, held, num_pauses = threading.Event(), threading.Event(), 0

    def work() -> None:
        nonlocal num_pauses
        while not is_over.wait(0.001):
            num_pauses += 1
            with busy.write():
                held.set()
                is_over.wait(0.05)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert held.wait(WAIT_SECONDS)
        for number in range(8):
            add_session(other, f"s{number}")
        assert num_pauses < 8 * 40
    finally:
        is_over.set()
        thread.join()
        busy.close()
        other.close()


def test_a_pool_without_a_free_connection_is_unavailable(database_url):
    database = Database(database_url, pool_size=1, lock_timeout_seconds=0.1)
    with database.read(), pytest.raises(StoreUnavailable, match="raise the pool size"), database.read():
        pass
    database.close()


def test_a_full_disk_is_unavailable_and_loses_nothing_that_was_committed(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/x.db", pool_size=1)
    database.upgrade()
    add_session(database, "kept")
    with database.write() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnavailable, match="full"), database.write() as connection:
        sessions.create_session(connection, Session(session_id="x", metadata={"large": "x" * 100_000}))
    with database.read() as connection:
        assert overview.count_rows(connection).sessions == {"open": 1}
    database.close()


def test_a_disk_that_fills_in_a_savepoint_is_named_and_not_the_savepoint(tmp_path):
    """What does not fit into SQLite's cache is written before the commit; SQLite undoes the whole transaction then."""
    database = Database(f"sqlite:///{tmp_path}/x.db", pool_size=1)
    database.upgrade()
    large = Session(session_id="x", metadata={"large": "x" * 3_000_000})
    with no_file_over(1_000_000), pytest.raises(StoreUnavailable, match=r"full|I/O"), database.write() as connection:
        attempt(connection, sessions.create_session, large)
    with database.write() as connection:
        attempt(connection, sessions.create_session, large)
    with database.read() as connection:
        assert overview.count_rows(connection).sessions == {"open": 1}
    database.close()


def test_a_database_that_cannot_be_reached_is_unavailable(tmp_path):
    for url in (f"sqlite:///{tmp_path}/nowhere/x.db", f"postgresql:///x?host={tmp_path}"):
        database = Database(url)
        with pytest.raises(StoreUnavailable, match="check that it runs"), database.read():
            pass
        database.close()


def test_a_file_that_cannot_be_opened_or_written_is_named(tmp_path):
    missing, locked = tmp_path / "nowhere" / "x.db", tmp_path / "x.db"
    locked.mkdir()
    for file in (missing, locked):
        database = Database(f"sqlite:///{file}")
        named = f"'{file}', which this process must read and write"
        with pytest.raises(StoreUnavailable, match=named), database.read():
            pass
        database.close()


@pytest.mark.postgres
@pytest.mark.parametrize("wrong", ["role", "database"])
def test_the_error_of_a_refused_login_names_the_settings_to_check(postgres_server, wrong):
    url = sa.make_url(postgres_server.url(postgres_server.create_database()))
    url = url.update_query_dict({"user": "nobody"}) if wrong == "role" else url.set(database="nowhere")
    database = Database(url.render_as_string(hide_password=False))
    with pytest.raises(StoreUnavailable, match=f"database login refused .*{wrong}.*check user, password and name"):
        database.check_schema()
    database.close()


def test_a_missing_table_is_an_error_that_names_the_command_to_run(empty_database_url):
    database = Database(empty_database_url)
    with pytest.raises(SchemaMismatch, match="turnwise db upgrade"), database.read() as connection:
        overview.count_rows(connection)
    database.close()


def test_a_value_that_the_database_cannot_store_is_the_callers_error(database):
    if database.dialect == "sqlite":
        add_session(database, "a\0b", turns=0)  # SQLite stores a NUL in a text
        return
    with pytest.raises(InvalidRequest, match="NUL"):
        add_session(database, "a\0b")


@pytest.mark.postgres
def test_a_pool_reconnects_to_a_restarted_server(postgres_server):
    name = postgres_server.create_database()
    database = Database(postgres_server.url(name), pool_size=2)
    database.upgrade()
    add_session(database, "before")
    postgres_server.stop()
    with pytest.raises(StoreUnavailable):
        add_session(database, "meanwhile")
    postgres_server.start()
    add_session(database, "after")
    with database.read() as connection:
        assert overview.count_rows(connection).sessions == {"open": 2}
    database.close()
    postgres_server.drop_database(name)


def test_a_text_that_no_index_has_room_for_is_refused_and_the_next_write_works(database):
    """An index of PostgreSQL takes 2,704 bytes, and random ones are not compressed; SQLite stores any text."""
    text = "".join(map(chr, random.Random(0).sample(range(0x4E00, 0x9FFF), 1000)))
    too_long = Session(session_id="s", task_id=text)
    if database.dialect == "postgresql":
        with pytest.raises(InvalidRequest, match="the database cannot hold a value"), database.write() as connection:
            sessions.create_session(connection, too_long)
    with database.write() as connection:
        sessions.create_session(connection, dataclasses.replace(too_long, task_id=text[:500]))


def test_a_lease_has_one_holder_and_a_token_that_grows_with_every_change(database):
    with database.write() as connection:
        assert acquire_lease(connection, "reload", "a", 10, NOW) == 1
        assert acquire_lease(connection, "reload", "b", 10, NOW + 9 * SECOND) is None
        assert acquire_lease(connection, "reload", "a", 10, NOW + 9 * SECOND) == 1  # longer, same token
        assert acquire_lease(connection, "other", "b", 10, NOW) == 1
        assert acquire_lease(connection, "reload", "b", 10, NOW + 19 * SECOND) == 2
        assert not renew_lease(connection, "reload", 1, 10, NOW + 19 * SECOND)
        assert not renew_lease(connection, "reload", 1, 0, NOW + 19 * SECOND)
        assert renew_lease(connection, "reload", 2, 20, NOW + 19 * SECOND)
        assert acquire_lease(connection, "reload", "a", 10, NOW + 30 * SECOND) is None
        assert renew_lease(connection, "reload", 2, 0, NOW + 30 * SECOND)
        assert acquire_lease(connection, "reload", "a", 10, NOW + 30 * SECOND) == 3
        assert acquire_lease(connection, "reload", "a", 10, NOW + 40 * SECOND) == 4, "it had expired"


def test_a_lease_of_a_dead_owner_is_void_once_the_clock_was_set_back(database):
    """Otherwise no process could take it until the clock has caught up, which may be hours."""
    with database.write() as connection:
        assert acquire_lease(connection, "reload", "dead", 10, NOW) == 1
        assert acquire_lease(connection, "reload", "b", 10, NOW - 9 * SECOND) is None
        assert acquire_lease(connection, "reload", "b", 10, NOW - 11 * SECOND) == 2


def test_one_of_several_processes_that_request_a_lease_concurrently_gets_it(database):
    barrier = threading.Barrier(4)
    tokens: list[int | None] = []

    def acquire(owner: str) -> None:
        barrier.wait(WAIT_SECONDS)
        with database.write() as connection:
            tokens.append(acquire_lease(connection, "reload", owner, 60))

    threads = [threading.Thread(target=acquire, args=(f"owner-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert sorted(tokens, key=str) == [1, None, None, None]


def test_a_connection_that_was_given_up_is_closed(silent_server):
    """A server that was stopped for a while must not find its places taken by connections that nobody uses."""
    port = silent_server.getsockname()[1]
    database = Database(f"postgresql://turnwise@127.0.0.1:{port}/turnwise", lock_timeout_seconds=1.0)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="ConnectionTimeout"), database.read():
                pass
            accepted, _ = silent_server.accept()
            with accepted:
                accepted.settimeout(WAIT_SECONDS)
                while accepted.recv(1024):
                    pass  # the client's first message; then the connection must end
    finally:
        gc.enable()
        database.close()


async def test_reads_that_wait_for_a_silent_database_end_and_take_no_thread_from_other_work(database_url, monkeypatch):
    answers, asked = threading.Event(), threading.Event()

    def wait_for_an_answer(_: object) -> None:
        asked.set()
        assert answers.wait(WAIT_SECONDS)

    database = Database(database_url, pool_size=1)
    try:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        first = asyncio.create_task(database.fetch(wait_for_an_answer))
        assert await asyncio.wait_for(asyncio.to_thread(asked.wait, WAIT_SECONDS), WAIT_SECONDS)
        monkeypatch.setattr("turnwise.store.database.QUEUE_SECONDS", 0.0)
        second = asyncio.create_task(database.fetch(overview.count_rows))
        await asyncio.wait_for(asyncio.to_thread(answers.set), WAIT_SECONDS)
        await first
        with pytest.raises(StoreUnavailable, match="busy with other reads"):
            await second
    finally:
        answers.set()
        database.close()


@pytest.fixture
def silent_server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_SECONDS)
        yield listening
