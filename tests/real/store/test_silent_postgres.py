"""A PostgreSQL whose processes are stopped: its kernel still acknowledges data, and it enforces no timeout."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from support.waiting import WAIT_SECONDS

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
    monkeypatch.setattr(stored_database, "ANSWER_SECONDS", WAIT_SECONDS)
    database = Database(postgres_url, pool_size=1)
    stopped = []

    def backend_of(connection: sa.Connection) -> int:
        """Return the process of a connection, which gets a second to answer from now on."""
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        connection.connection.driver_connection.answer_seconds = 1.0
        return int(pid)

    def stop(backend: int) -> None:
        stopped.append(backend)
        os.kill(backend, signal.SIGSTOP)

    def read_from_stopped() -> None:
        with database.read() as connection:
            stop(backend_of(connection))
            serving.serving_state(connection)

    def read_from_another() -> int:
        with database.read() as connection:
            serving.serving_state(connection)
            return backend_of(connection)

    with ThreadPoolExecutor(1) as reader:
        try:
            with pytest.raises(StoreUnavailable, match="has not answered"):
                reader.submit(read_from_stopped).result(WAIT_SECONDS)
            stop(reader.submit(read_from_another).result(WAIT_SECONDS))  # while the connection is idle in the pool
            assert reader.submit(read_from_another).result(WAIT_SECONDS) not in stopped
        finally:
            for backend in stopped:
                os.kill(backend, signal.SIGCONT)
    database.close()


def test_the_server_cancels_a_statement_that_takes_too_long(postgres_url, monkeypatch):
    monkeypatch.setattr(stored_database, "ANSWER_SECONDS", 0.3)
    database = Database(postgres_url, pool_size=1)
    with pytest.raises(StoreUnavailable, match="statement timeout"), database.read() as connection:
        connection.exec_driver_sql("SELECT pg_sleep(30)")
    database.close()
