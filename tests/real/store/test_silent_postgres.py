"""A PostgreSQL whose processes are stopped: its kernel still acknowledges data, and it enforces no timeout."""

import os
import signal
import time

import pytest

from turnwise.errors import StoreUnavailable
from turnwise.store import database as stored_database
from turnwise.store import serving
from turnwise.store.database import Database

pytestmark = pytest.mark.postgres


@pytest.fixture
def postgres_url(postgres_server, postgres_template):
    name = postgres_server.create_database(postgres_template)
    yield postgres_server.url(name)
    postgres_server.drop_database(name)


def test_a_statement_without_an_answer_fails_at_its_deadline_and_the_pool_recovers(postgres_url, monkeypatch):
    """Without a deadline each such request blocks one more thread of the pool forever."""
    monkeypatch.setattr(stored_database, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(stored_database, "GRACE_SECONDS", 1.0)
    database = Database(postgres_url, pool_size=1)
    stopped = []

    def stop_backend(connection) -> None:
        stopped.append(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        os.kill(stopped[-1], signal.SIGSTOP)

    def read_from_stopped() -> None:
        with database.read() as connection:
            stop_backend(connection)
            serving.serving_state(connection)

    started = time.monotonic()
    try:
        with pytest.raises(StoreUnavailable, match="has not answered"):
            read_from_stopped()
        with database.read() as connection:
            serving.serving_state(connection)
            idle = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        os.kill(idle, signal.SIGSTOP)  # while the connection is idle in the pool
        stopped.append(idle)
        with database.read() as connection:
            serving.serving_state(connection)
    finally:
        for backend in stopped:
            os.kill(backend, signal.SIGCONT)
        database.close()
    assert time.monotonic() - started < 100  # without a deadline, as long as the server is stopped


def test_the_server_cancels_a_statement_that_takes_too_long(postgres_url, monkeypatch):
    monkeypatch.setattr(stored_database, "ANSWER_SECONDS", 0.3)
    database = Database(postgres_url, pool_size=1)
    with pytest.raises(StoreUnavailable, match="statement timeout"), database.read() as connection:
        connection.exec_driver_sql("SELECT pg_sleep(30)")
    database.close()
