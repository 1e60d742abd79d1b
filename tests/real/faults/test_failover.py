"""A PostgreSQL that fails over to its replica under load, directly and behind pgbouncer: nothing is lost or doubled."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from chaos import invariants
from chaos.agents import Crowd
from support.ledger_samples import add_finished
from support.private_postgres import PrivatePostgres, identity
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.client import Client
from turnwise.errors import Conflict
from turnwise.features.policies import publish_next
from turnwise.store import schema
from turnwise.store.database import Database
from turnwise.types import PolicyKind

pytestmark = [pytest.mark.postgres, pytest.mark.slow]
PGBOUNCER = os.environ.get("TURNWISE_PGBOUNCER") or shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
NUM_AGENTS = 8
NUM_SESSIONS = 96
PORT = 6432


@pytest.fixture
def pair():
    """A primary and its replica, which has each commit before it is acknowledged; and the name of a database."""
    with contextlib.ExitStack() as running:
        primary = PrivatePostgres()
        running.callback(primary.close)
        primary.start()
        name = primary.create_database()
        replica = PrivatePostgres(of=primary)
        running.callback(replica.close)
        replica.start()
        primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.sql("SELECT pg_reload_conf()")
        wait_until(
            lambda: primary.sql("SELECT sync_state FROM pg_stat_replication") == [("sync",)], "the replica follows"
        )
        yield primary, replica, name


class Pooler:
    """A pgbouncer, which sends its clients to one server."""

    def __init__(self, server: PrivatePostgres, name: str, mode: str, num_connections: int = 60) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="turnwise-pgbouncer-", dir="/tmp"))
        self._name, self._mode, self._file = name, mode, self.directory / "pgbouncer.ini"
        self._num_connections = num_connections
        self._write(server)
        if owner := identity():
            os.chown(self.directory, owner["user"], owner["group"])
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen([PGBOUNCER, self._file], stdout=log, stderr=log, **identity())
        wait_until((self.directory / f".s.PGSQL.{PORT}").exists, "the pooler listens")

    @property
    def url(self) -> str:
        return f"postgresql:///{self._name}?host={self.directory}&port={PORT}&user=turnwise"

    def _write(self, server: PrivatePostgres) -> None:
        self._file.write_text(
            f"[databases]\n{self._name} = host={server.directory} user=turnwise\n[pgbouncer]\nauth_type = any\n"
            f"unix_socket_dir = {self.directory}\nlisten_port = {PORT}\npool_mode = {self._mode}\n"
            "ignore_startup_parameters = options\nserver_login_retry = 1\n"
            f"default_pool_size = {self._num_connections}\n"
        )

    def send_to(self, server: PrivatePostgres) -> None:
        self._write(server)
        self._process.send_signal(signal.SIGHUP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        shutil.rmtree(self.directory)


needs_pgbouncer = pytest.mark.skipif(
    PGBOUNCER is None, reason="pgbouncer is not installed; TURNWISE_PGBOUNCER names one"
)


@needs_pgbouncer
def test_clients_that_share_a_connection_of_a_pooler_execute_no_statement_of_each_other(postgres_server):
    """Each client would name its first prepared statement alike, on one connection of the server."""
    name = postgres_server.create_database()
    pooler = Pooler(postgres_server, name, "transaction", num_connections=1)
    with contextlib.closing(pooler), contextlib.ExitStack() as running:
        clients = [running.enter_context(contextlib.closing(Database(pooler.url))) for _ in range(2)]
        for _ in range(12):
            for number, client in enumerate(clients):
                with client.write() as connection:
                    found = connection.execute(sa.text(f"SELECT {number} + :x"), {"x": 1}).scalar_one()
                    assert found == number + 1


@pytest.mark.parametrize(
    "mode", ["direct", *(pytest.param(mode, marks=needs_pgbouncer) for mode in ("session", "transaction"))]
)
def test_a_failover_under_load_loses_and_doubles_no_turn_and_all_agents_finish(mode, pair, tmp_path):
    primary, replica, name = pair
    with contextlib.ExitStack() as running:
        both = f"postgresql:///{name}?host={primary.directory},{replica.directory}&user=turnwise"
        url, pooler = both + "&target_session_attrs=read-write", None
        if mode != "direct":
            pooler = Pooler(primary, name, mode)
            running.callback(pooler.close)
            url = pooler.url
        engine = running.enter_context(running_fake_engine(Script(pace_seconds=0.002)))
        flags = ("--commit-timeout-seconds", "5")
        proxies = [running.enter_context(running_proxy(engine.url, url, tmp_path, *flags)) for _ in range(2)]
        crowd = Crowd(
            {"default": "any"}, [each.url for each in proxies], NUM_AGENTS, think_seconds=0.05, is_varied=False
        )
        running.callback(crowd.close)
        crowd.go()
        crowd.wait_for(10 * NUM_AGENTS)
        before = len(crowd.observed.replies)
        primary.stop(signal.SIGQUIT)
        replica.sql("SELECT pg_promote()")
        if pooler is not None:
            pooler.send_to(replica)
        crowd.wait_for(10 * NUM_AGENTS)
        crowd.finish()
        observed = crowd.observed
        with contextlib.closing(Database(replica.url(name))) as database:
            stored = invariants.stored_turns(database)
        longest = max(end - start for start, end in observed.attempts)
        print(
            f"{mode}: {before} replies before the failover, {len(observed.replies) - before} after it, refusals "
            f"{dict(observed.refusals)}, {observed.broken_connections} connections broken, longest attempt "
            f"{longest:.1f} s"
        )
        found = invariants.lost_or_doubled(observed, stored, [engine])
        assert not found, invariants.shortened(found)


def test_trainers_that_claim_over_http_train_each_experience_once_through_a_failover(pair, tmp_path):
    """What one holds is acknowledged by the server that took over; who is late there is refused in words."""
    primary, replica, name = pair
    both = f"postgresql:///{name}?host={primary.directory},{replica.directory}&user=turnwise"
    url = both + "&target_session_attrs=read-write"
    with contextlib.ExitStack() as running:
        engine = running.enter_context(running_fake_engine())
        flags = ("--commit-timeout-seconds", "5")
        proxies = [running.enter_context(running_proxy(engine.url, url, tmp_path, *flags)) for _ in range(2)]
        database = running.enter_context(contextlib.closing(Database(url)))
        for number in range(NUM_SESSIONS):
            add_finished(database, f"s{number}")
        with database.write() as connection:
            version = publish_next(connection, "/nowhere", PolicyKind.FULL, metrics={}).version
        clients = [running.enter_context(Client(each.url, max_retries=1000)) for each in proxies]
        acknowledged, lock, failed_over = list[str](), threading.Lock(), threading.Event()

        def acknowledge(client: Client, held: dict, trainer: str) -> None:
            trained = {turn: 0.5 for chain in held["chains"] for turn in chain["turn_ids"]}
            client.acknowledge_claim(held, trainer, version, trained)
            with lock:
                acknowledged.extend(chain["session_id"] for chain in held["chains"])

        def train(worker: int) -> None:
            client, deadline = clients[worker % 2], time.monotonic() + WAIT_SECONDS
            while len(acknowledged) < NUM_SESSIONS:
                assert time.monotonic() < deadline, f"{len(acknowledged)} of {NUM_SESSIONS} were trained"
                held = client.claim(f"t{worker}", max_groups=4, lease_seconds=600.0)
                if held["groups"]:
                    acknowledge(client, held, f"t{worker}")
                if len(acknowledged) > NUM_SESSIONS // 3:  # the others train on when the primary has died
                    failed_over.wait(WAIT_SECONDS)

        held, late = (clients[0].claim(each, max_groups=4, lease_seconds=600.0) for each in ("holder", "late"))
        with ThreadPoolExecutor(4) as pool:
            training = [pool.submit(train, worker) for worker in range(4)]
            wait_until(lambda: len(acknowledged) > NUM_SESSIONS // 4, "the trainers train")
            primary.stop(signal.SIGQUIT)
            replica.sql("SELECT pg_promote()")
            failed_over.set()
            acknowledge(clients[1], held, "holder")
            promoted = running.enter_context(contextlib.closing(Database(replica.url(name))))
            with promoted.write() as connection:
                is_late = schema.groups.c.group_pk.in_([each["group"] for each in late["groups"]])
                connection.execute(sa.update(schema.groups).where(is_late).values(leased_until=1))
            [each.result() for each in training]
        with pytest.raises(Conflict, match="no longer held under fencing token 1"):
            acknowledge(clients[0], late, "late")
        assert sorted(acknowledged) == sorted(f"s{number}" for number in range(NUM_SESSIONS))
        with promoted.read() as connection:
            trained = connection.execute(sa.select(schema.trained_sessions.c.session_pk)).scalars().all()
            statuses = connection.execute(sa.select(schema.groups.c.status).distinct()).scalars().all()
        assert (len(trained), len(set(trained)), statuses) == (NUM_SESSIONS, NUM_SESSIONS, ["trained"])
