"""A whole system under load: two engines, two proxies, two trainers, agents of two tenants, and policy reloads."""

import contextlib
import shutil
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path

from chaos.agents import Crowd
from chaos.parts import ProxyPart, TrainerPart
from chaos.relay import Relay
from support.control_plane import ask
from support.database_clock import DatabaseClock
from support.ports import free_port
from support.private_postgres import PrivatePostgres
from support.tiny_checkpoints import write_weights
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

from turnwise.store import keys
from turnwise.store.database import Database

TENANTS = ("red", "blue")
AGENTS_PER_TENANT = 4
HOUR = 3600.0
SKEWS = {"sqlite": (0.0, HOUR / 2), "postgresql": (3 * HOUR, 72 * HOUR)}
"""Errors of the trainers' own clocks. On SQLite a trainer that is ahead treats every other lease as expired; on
PostgreSQL there is no effect, though by its own clock the second would treat every open group as stalled.
"""
RELOAD_SECONDS = 2.0
PACE_SECONDS = 0.002
SOCKET = ".s.PGSQL.5432"


class World:
    def __init__(self, kind: str, directory: Path, running: contextlib.ExitStack) -> None:
        self.kind = kind
        self._running = running
        self.engines: list[RunningFakeEngine] = [
            running.enter_context(running_fake_engine(Script(pace_seconds=PACE_SECONDS))) for _ in range(2)
        ]
        self.engine_relays = [self._relay(int(engine.url.rpartition(":")[2])) for engine in self.engines]
        self.database_relay: Relay | None = None
        self.postgres: PrivatePostgres | None = None
        self.url, proxies_url = self._make_database(kind, directory)
        self.database = Database(self.url, lock_timeout_seconds=WAIT_SECONDS)
        running.callback(self.database.close)
        self.database.upgrade()
        self.clock = DatabaseClock(self.database, directory)
        with self.database.write() as connection:
            self.tenant_keys = {
                tenant: keys.create_key(connection, tenant, keys.KeyRole.AGENT, "chaos")[1] for tenant in TENANTS
            }
            self._admin = keys.create_key(connection, "default", keys.KeyRole.ADMIN, "chaos")[1]
        self.proxies: list[ProxyPart] = []
        for number in range(2):
            place = directory / f"proxy-{number}"
            place.mkdir()
            part = ProxyPart([relay.url for relay in self.engine_relays], proxies_url, place, free_port())
            running.callback(part.close)
            self.proxies.append(part)
        self.client_relays = [self._relay(int(part.proxy.url.rpartition(":")[2])) for part in self.proxies]
        self._directory = directory
        self._publish(1)
        self.trainers = []
        for number, skew_seconds in enumerate(SKEWS[kind], 1):
            trainer = TrainerPart(number, self.url, skew_seconds, self.clock.file, directory)
            running.callback(trainer.close)
            self.trainers.append(trainer)
        self.crowd = Crowd(self.tenant_keys, [relay.url for relay in self.client_relays], AGENTS_PER_TENANT)
        self.crowd.go()
        self._start_reloads()

    @property
    def sqlite_file(self) -> Path:
        return Path(self.url.removeprefix("sqlite:///"))

    def revive(self) -> None:
        for trainer in self.trainers:
            trainer.revive()

    def _relay(self, target: int | Path, listen: int | Path = 0) -> Relay:
        relay = Relay(target, listen)
        self._running.callback(relay.close)
        return relay

    def _make_database(self, kind: str, directory: Path) -> tuple[str, str]:
        """Return the database's URL for the checks and trainers, and the one for the proxies."""
        if kind == "sqlite":
            place = directory / "database"
            place.mkdir()
            return (f"sqlite:///{place}/turnwise.db",) * 2
        self.postgres = PrivatePostgres()
        self._running.callback(self.postgres.close)
        self.postgres.start()
        name = self.postgres.create_database()
        # A socket's path has at most 107 bytes, and a test's directory may be longer.
        sockets = self.postgres.directory / "relay"
        sockets.mkdir()
        self.database_relay = self._relay(self.postgres.directory / SOCKET, sockets / SOCKET)
        return self.postgres.url(name), f"postgresql:///{name}?host={sockets}&user=turnwise"

    def _start_reloads(self) -> None:
        stop = threading.Event()

        def reload() -> None:
            version = 2
            while not stop.wait(RELOAD_SECONDS):
                # A proxy that is killed or cut off refuses; the next round tries the next version.
                with contextlib.suppress(OSError, urllib.error.HTTPError):
                    self._publish(version)
                version += 1

        thread = threading.Thread(target=reload, name="reloads")
        thread.start()
        self._running.callback(thread.join)
        self._running.callback(stop.set)

    def _publish(self, version: int) -> None:
        place = write_weights(self._directory / f"v{version}")
        ask(
            self.proxies[version % 2].proxy.url,
            "/v1/policies",
            {"path": str(place), "version": version},
            key=self._admin,
        )


@contextlib.contextmanager
def world(kind: str, directory: Path) -> Iterator[World]:
    with contextlib.ExitStack() as running:
        yield World(kind, directory, running)
    shutil.rmtree(directory, ignore_errors=True)
