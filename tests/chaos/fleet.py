"""Engines and hosts that come and go under many agents, each from a seed; then a check of every call and version.

A file names the engines to several proxies. A host has several engines. New weights are published all the time. A call
whose engine is killed may break only where its client has begun to get the reply.
"""

import contextlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import httpx2
from chaos import invariants
from chaos.agents import Crowd, Observed
from support.control_plane import ask, metric
from support.private_postgres import PrivatePostgres
from support.proxies import RunningProxy, running_proxy
from support.tiny_checkpoints import write_weights
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

from turnwise.store import keys
from turnwise.store.database import Database

TENANTS = ("red", "blue")
HOST_SIZE = 4
PACE_SECONDS = 0.04
"""Of a stand-in for a token: a reply takes about a second, so that kills hit calls that run."""
FLAGS = ("--policy-tenant", "default", "--holdout-share", "0", "--commit-timeout-seconds", "60")
JOINS, LEAVES = "an engine joins", "an engine leaves"
STREAM_BROKE = 200
"""Status of a reply that had begun when its error came."""


class Fleet:
    """What runs, and who is named to the proxies."""

    flags = FLAGS
    fields: ClassVar[Mapping[str, Any]] = {}
    """What agents' requests have."""

    def __init__(self, directory: Path, running: contextlib.ExitStack, num_engines: int, num_proxies: int) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._running, self.size = directory, running, num_engines
        self._file = directory / "engines.json"
        self.all: list[RunningFakeEngine] = []
        """All stand-ins that ever ran; what they sampled is compared with what is stored."""
        self.alive = [self.start() for _ in range(num_engines)]
        self._write()
        postgres = PrivatePostgres()
        running.callback(postgres.close)
        postgres.start()
        url = postgres.url(postgres.create_database())
        self.database = Database(url, lock_timeout_seconds=WAIT_SECONDS)
        running.callback(self.database.close)
        self.database.upgrade()
        with self.database.write() as connection:
            self.keys = {
                tenant: keys.create_key(connection, tenant, keys.KeyRole.AGENT, "chaos")[1] for tenant in TENANTS
            }
            self._admin = keys.create_key(connection, "default", keys.KeyRole.ADMIN, "chaos")[1]
        flags = ("--engines", f"file://{self._file}", *self.flags)
        self.proxies: list[RunningProxy] = [
            running.enter_context(running_proxy(None, url, directory, *flags)) for _ in range(num_proxies)
        ]
        self.version = 0
        self.publish()

    def start(self, port: int = 0) -> RunningFakeEngine:
        engine = self._running.enter_context(running_fake_engine(Script(pace_seconds=PACE_SECONDS), port=port))
        self.all.append(engine)
        return engine

    def is_idle(self, engine: RunningFakeEngine) -> bool:
        return all(call.outcome != "running" for call in engine.calls)

    def write_version(self, place: Path) -> Path:
        return write_weights(place)

    def violations(self, observed: Observed) -> list[str]:
        """Return what is wrong with replies and versions, as far as the stand-ins know."""
        stored = invariants.stored_turns(self.database)
        return [
            *invariants.lost_or_doubled(observed, stored, self.all),
            *invariants.wrong_versions(self.all, stored),
        ]

    def name(self, *engines: RunningFakeEngine) -> None:
        """Let these be the engines that are named."""
        self.alive = list(engines)
        self._write()

    def _write(self) -> None:
        staged = self._file.with_suffix(".new")
        staged.write_text(json.dumps([engine.url for engine in self.alive]))
        staged.replace(self._file)

    def publish(self) -> None:
        self.version += 1
        place = self.write_version(self._directory / f"v{self.version}")
        ask(self.proxies[0].url, "/v1/policies", {"path": str(place), "version": self.version}, key=self._admin)

    def served(self) -> list[dict[str, int | None]]:
        """Return the version of each engine that gets calls, by its address, as each proxy says it."""
        head = {"authorization": f"Bearer {self._admin}"}
        answers = [
            httpx2.get(f"{proxy.url}/readyz", headers=head, timeout=60).json()["engines"] for proxy in self.proxies
        ]
        return [{each["url"]: each["policy_version"] for each in answer if each["ready"]} for answer in answers]

    def is_whole(self) -> bool:
        """Return whether all proxies send calls to just the engines that are named."""
        wanted = {engine.url for engine in self.alive}
        return all(set(served) == wanted for served in self.served())

    def num_moved(self) -> int:
        found = (
            metric(proxy, "turnwise_retries_total", admin_key=self._admin, what="engine") for proxy in self.proxies
        )
        return int(sum(found))


class Comings:
    """Lets engines and hosts come and go; each event leaves as many engines as there were."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._rng = fleet, random.Random(seed)
        self.events: dict[str, Callable[[], None]] = {
            "an engine is killed and comes back": self._kill,
            JOINS: self._join,
            LEAVES: self._leave,
            "an engine moves": self._move,
            "a host is killed and another one comes": self._replace_host,
        }
        if fleet.size == 1:  # the calls of an engine that is killed need another one
            self.events = {name: self.events[name] for name in (JOINS, LEAVES)}

    def choose(self) -> str:
        """Return the next event; where engines have become more or fewer than at the start, one that mends it."""
        chosen = self._rng.choice(sorted(self.events))
        if chosen in (JOINS, LEAVES) and len(self._fleet.alive) != self._fleet.size:
            chosen = LEAVES if len(self._fleet.alive) > self._fleet.size else JOINS
        return chosen

    def _some(self, number: int = 1) -> list[RunningFakeEngine]:
        return self._rng.sample(self._fleet.alive, number)

    def _others(self, gone: list[RunningFakeEngine]) -> list[RunningFakeEngine]:
        return [each for each in self._fleet.alive if each not in gone]

    def _kill(self) -> None:
        """It is named all the time, and comes back at its address with the weights of its start."""
        (gone,) = self._some()
        gone.kill()
        wait_until(lambda: gone.url not in set().union(*self._fleet.served()), "the proxies notice that it is gone")
        came = self._fleet.start(int(gone.url.rpartition(":")[2]))
        self._fleet.name(*self._others([gone]), came)

    def _join(self) -> None:
        self._fleet.name(*self._fleet.alive, self._fleet.start())

    def _leave(self) -> None:
        """It ends once it has no call any more, as an engine does that its cluster drains."""
        (gone,) = self._some()
        self._fleet.name(*self._others([gone]))
        wait_until(self._fleet.is_whole, "the proxies let it go")
        wait_until(lambda: self._fleet.is_idle(gone), "its last call ends")
        gone.kill()

    def _move(self) -> None:
        (gone,) = self._some()
        gone.kill()
        self._fleet.name(*self._others([gone]), self._fleet.start())

    def _replace_host(self) -> None:
        gone = self._some(min(HOST_SIZE, len(self._fleet.alive) - 1))
        for each in gone:
            each.kill()
        self._fleet.name(*self._others(gone), *(self._fleet.start() for _ in gone))


@contextlib.contextmanager
def fleet(directory: Path, num_engines: int, kind: type[Fleet] = Fleet, *, num_proxies: int = 2) -> Iterator[Fleet]:
    with contextlib.ExitStack() as running:
        yield kind(directory, running, num_engines, num_proxies)
    shutil.rmtree(directory, ignore_errors=True)


def play(
    running: Fleet, seed: int, say: Callable[[str], None], *, seconds: float, num_agents: int, every_seconds: float
) -> tuple[list[str], str]:
    """Play until the time is up, and once through all events; return what was violated, and a summary."""
    comings, rounds, started = Comings(running, seed), list[str](), time.monotonic()
    first = iter(comings.events)
    crowd = Crowd(
        running.keys,
        [proxy.url for proxy in running.proxies],
        num_agents // len(TENANTS),
        think_seconds=every_seconds / 5,
        is_varied=False,
        fields=running.fields,
    )
    try:
        crowd.go()
        crowd.wait_for(num_agents)
        while (name := next(first, None)) or time.monotonic() < started + seconds:
            name, due = name or comings.choose(), time.monotonic() + every_seconds
            rounds.append(name)
            say(f"{time.monotonic() - started:7.1f} s: {name}; {len(crowd.observed.replies)} replies")
            comings.events[name]()
            running.publish()
            wait_until(running.is_whole, f"all engines serve after {name!r}; seed {seed}")
            wait_until(
                lambda: all(set(served.values()) == {running.version} for served in running.served()),
                f"all engines serve version {running.version}",
            )
            crowd.wait_for(num_agents // 4)
            while time.monotonic() < due:  # events come at a pace, however fast the fleet is whole again
                crowd.wait_for(1)
    finally:
        crowd.stop()
    crowd.join(WAIT_SECONDS)
    found = [
        *running.violations(crowd.observed),
        *(["the agents did not finish"] if crowd.is_playing() else []),
    ]
    cut = {error: n for error, n in crowd.observed.refusals.items() if error[0] == STREAM_BROKE}
    failed = crowd.observed.refusals - Counter(cut)
    found += [f"{n} calls failed: {error} {crowd.observed.messages[error]}" for error, n in failed.items()]
    if crowd.observed.broken_connections:
        found.append(f"{crowd.observed.broken_connections} connections broke")
    summary = (
        f"{type(running).__name__}, seed {seed}: {num_agents} agents, {len(running.proxies)} proxies, "
        f"{len(running.alive)} engines at the end and {len(running.all)} in all, "
        f"{len(rounds)} events in {time.monotonic() - started:.0f} s "
        f"({dict(Counter(rounds))}), version {running.version}, {len(crowd.observed.replies)} replies seen whole, "
        f"{failed.total()} calls failed, "
        f"{sum(cut.values())} streams broke after they had begun, {running.num_moved()} calls sampled anew by another "
        f"engine, {len(found)} violations"
    )
    return found, summary
