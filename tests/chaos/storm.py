"""The storm: faults chosen by a seed, one or two at a time, until the time is up; then a check of everything.

After each round the agents must make progress again. The seed decides which faults come, in which order and for how
long.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from chaos import invariants
from chaos.world import World
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.features.page import overview

KILL_A_PROXY = "kill a proxy"
RESTART_THE_DATABASE = "restart the database"
FIRST_FAULTS = [KILL_A_PROXY, "stop a trainer", "jump the clock", "kill a trainer"]
"""Faults of the first rounds, one each, so that a short storm has them too."""
HOLD_SECONDS = (0.2, 2.5)
LONG_HOLD_SECONDS = (6.0, 9.0)
"""Longer than the proxies' own deadlines; one round in ten."""
LONG_SHARE = 0.1
DELAY_SECONDS = 0.05
HOUR = 3600.0
CLOCK_JUMPS = [3 * HOUR, -5 * HOUR, 30 * HOUR, -30 * HOUR, 0.5]
CHECK_EVERY_SECONDS = 30.0

Fault = AbstractContextManager[None]


@dataclasses.dataclass
class Report:
    seed: int
    faults: list[str] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    """Bytes of the proxy that is never killed, after each round."""
    summary: str = ""


class Storm:
    def __init__(self, world: World, seed: int, say: Callable[[str], None]) -> None:
        self._world = world
        self._rng = random.Random(seed)
        self._say = say
        self._started = time.monotonic()
        self._checked = self._started
        self.report = Report(seed)

    def run(self, seconds: float) -> Report:
        """Break parts until the time is up, restore them, wait for the end of all work, and check everything."""
        crowd = self._world.crowd
        try:
            self._wait_for_progress()
            for name in FIRST_FAULTS:
                self._round(name)
            self._round()  # on a slow machine the time may be up already
            while time.monotonic() < self._started + seconds:
                self._round()
            self._world.clock.jump(0.0)
        finally:
            crowd.stop()
        crowd.join(WAIT_SECONDS)
        if crowd.is_playing():
            self.report.violations.append(f"the agents did not finish within {WAIT_SECONDS:.0f} s after the storm")
            return self.report
        self._wait_until_trained()
        self.report.violations += invariants.violations(self._world, crowd.observed)
        self.report.violations += invariants.grown(self.report.memory)
        self.report.summary = self._summary()
        return self.report

    def _round(self, *names: str) -> None:
        names = names or tuple(self._rng.sample(sorted(self._faults()), self._rng.choice([1, 1, 2])))
        hold = self._rng.uniform(*(LONG_HOLD_SECONDS if self._rng.random() < LONG_SHARE else HOLD_SECONDS))
        line = f"{time.monotonic() - self._started:7.1f} s: {' and '.join(names)} for {hold:.1f} s"
        self.report.faults.append(line)
        self._say(line)
        with contextlib.ExitStack() as broken:
            # The killed proxy is the last one that ends: its start needs the database and an engine. The database is
            # stopped last: a jump of its clock is written to it.
            for name in sorted(names, key=lambda name: (name != KILL_A_PROXY, name == RESTART_THE_DATABASE)):
                broken.enter_context(self._faults()[name]())
            time.sleep(hold)  # how long a fault lasts is part of the seed
        self._world.revive()
        self._wait_for_progress()
        self.report.memory.append(self._world.proxies[0].resident_bytes())
        if time.monotonic() > self._checked + CHECK_EVERY_SECONDS:
            self._checked = time.monotonic()
            self.report.violations += invariants.trained_more_than_once(self._world.database)

    def _faults(self) -> dict[str, Callable[[], Fault]]:
        """Return the possible faults. The first proxy is never killed: its memory is measured."""
        world, number = self._world, self._rng.randrange(2)
        proxy, trainer = world.proxies[number], world.trainers[number]
        faults: dict[str, Callable[[], Fault]] = {
            KILL_A_PROXY: self._killed_proxy,
            "stop a proxy": proxy.stopped,
            "kill a writer": lambda: _at_once(proxy.kill_writer),
            "stop a writer": lambda: proxy.stopped(writer=True),
            "kill a trainer": lambda: _at_once(trainer.kill),
            "stop a trainer": trainer.stopped,
            "jump the clock": lambda: _at_once(lambda: world.clock.jump(self._rng.choice(CLOCK_JUMPS))),
        }
        relays = {"clients": world.client_relays[number], "an engine": world.engine_relays[number]}
        if world.database_relay is not None:
            relays["the database"] = world.database_relay
        for name, relay in relays.items():
            faults[f"cut off {name}"] = lambda relay=relay: _until_restored(relay.cut, relay.restore)
            faults[f"stall {name}"] = lambda relay=relay: _until_restored(relay.stall, relay.restore)
            faults[f"delay {name}"] = lambda relay=relay: _until_restored(
                lambda: relay.delay(DELAY_SECONDS), relay.restore
            )
        if world.postgres is None:
            faults["fill the disk"] = lambda: proxy.full_disk(world.sqlite_file)
        else:
            faults[RESTART_THE_DATABASE] = lambda: _until_restored(world.postgres.stop, world.postgres.start)
        return faults

    @contextlib.contextmanager
    def _killed_proxy(self) -> Iterator[None]:
        proxy = self._world.proxies[1]
        proxy.kill()
        yield
        proxy.restart()

    def _wait_for_progress(self) -> None:
        """Wait until the agents have received new replies: nothing may stay broken."""
        observed, wanted = self._world.crowd.observed, self._world.crowd.num_agents
        before = len(observed.replies)
        wait_until(
            lambda: len(observed.replies) >= before + wanted,
            f"the agents get replies again; seed {self.report.seed}, last fault {self.report.faults[-1:]}, "
            f"refusals {dict(observed.refusals)}, violations {observed.violations[:3]}",
            WAIT_SECONDS,
        )

    def _wait_until_trained(self) -> None:
        world = self._world

        def is_all_trained() -> bool:
            world.revive()
            with world.database.read() as connection:
                statuses = overview.count_rows(connection).groups
            return set(statuses) <= {"trained", "dropped"}

        try:
            wait_until(is_all_trained, "all groups are trained")
        except AssertionError as error:
            self.report.violations.append(str(error))

    def _summary(self) -> str:
        observed = self._world.crowd.observed
        trained = len(invariants.times_trained(self._world.database))
        longest = max(end - start for start, end in observed.attempts)
        return (
            f"{self._world.kind}, seed {self.report.seed}: {len(self.report.faults)} rounds of faults, "
            f"{len(observed.replies)} replies seen whole, {trained} turns trained, "
            f"refusals {dict(observed.refusals)}, {observed.broken_connections} connections broken, longest attempt "
            f"{longest:.1f} s, memory {min(self.report.memory) / 2**20:.0f} to "
            f"{max(self.report.memory) / 2**20:.0f} MiB; {len(self.report.violations)} violations"
        )


@contextlib.contextmanager
def _at_once(what: Callable[[], None]) -> Iterator[None]:
    what()
    yield


@contextlib.contextmanager
def _until_restored(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    begin()
    yield
    end()
