"""Trainers that claim concurrently while they are killed, stopped beyond their leases, and given wrong clocks.

An update's record lists its turns and is written in the transaction of the ack, so the test reads from it what was
acked, and how often. With SQLite all trainers are on one machine, whose clock jumps, and one trainer's own clock is
off. PostgreSQL has its own clock, which jumps, while the trainers' clocks are off by hours, each differently.
"""

import contextlib
import dataclasses
import itertools
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from support.claiming_trainer import LEASE_SECONDS
from support.database_clock import DatabaseClock
from support.waiting import wait_until

from turnwise.store import overview, rewards, schema, sessions, updates
from turnwise.store.database import Database
from turnwise.store.turns import append_turns
from turnwise.types import Reward, Session, Turn

HOUR = 3600.0
GROUP_SIZE = 2
SESSIONS_A_TRANSACTION = 250
PATIENCE_SECONDS = 180.0
PROGRAM = Path(__file__).parents[2] / "support" / "claiming_trainer.py"
SKEWS = {"sqlite": {2: HOUR / 2}, "postgresql": {1: 3 * HOUR, 2: -5 * HOUR, 3: 72 * HOUR}}
"""Clock errors of the trainers, by number. On SQLite a trainer that is ahead treats every other lease as expired; on
PostgreSQL there is no effect, though by its own clock the third would treat every open group as stalled.
"""
JUMPS = [3 * HOUR, -5 * HOUR, 0.0, 30 * HOUR, -30 * HOUR, 0.5]
"""Error of the machine's or the server's clock after each jump."""
LAST_JUMP = -60 * HOUR
"""Set back behind all others while a dead trainer still holds a lease."""


@dataclasses.dataclass
class Trainer:
    name: str
    command: list[str]
    output: Path
    process: subprocess.Popen[bytes]

    def has_claimed(self) -> bool:
        return f"{self.process.pid} holds" in self.output.read_text().splitlines()


class Crew:
    def __init__(self, database: Database, url: str, clock: DatabaseClock, directory: Path, size: int) -> None:
        self._database = database
        self._rng = random.Random(size)
        self._hold = directory / "hold"
        self._ahead: list[str] = []
        self.trainers: list[Trainer] = []
        self._outputs: list[Path] = []
        for number in range(1, size + 1):
            name = f"trainer-{number}"
            skew = str(SKEWS[database.dialect].get(number, 0.0))
            command = [sys.executable, str(PROGRAM), url, name, str(number), skew, str(clock.file), str(self._hold)]
            output = directory / name
            self._outputs.append(output)
            if database.dialect == "sqlite" and float(skew) > 0:
                self._ahead.append(name)
            self.trainers.append(Trainer(name, command, output, _start(command, output)))

    def hold(self) -> None:
        self._hold.touch()

    def release(self) -> None:
        self._hold.unlink()

    def kill_and_restart(self) -> None:
        """`kill -9` a trainer that holds groups; the next process of its name takes over its claims."""
        trainer = self._holder()
        trainer.process.kill()
        trainer.process.wait()
        trainer.process = _start(trainer.command, trainer.output)
        self.release()

    def kill_without_restart(self) -> None:
        """`kill -9` a trainer that holds groups; the others have to wait until its lease expires."""
        trainer = self._holder()
        trainer.process.kill()
        trainer.process.wait()
        self.trainers.remove(trainer)
        self.release()

    def freeze_beyond_the_lease(self) -> None:
        """SIGSTOP a trainer that holds groups until another has claimed one, then continue it: its ack is refused.

        A trainer whose leases last long by the others' clocks is not chosen.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            trainer = self._holder(lambda one: one.name not in self._ahead)
            trainer.process.send_signal(signal.SIGSTOP)
            refused = _refused(trainer.output)
            held = self._held_by(trainer)
            # The trainer whose clock is ahead may have claimed its groups before it was stopped: then try another.
            if not held:
                trainer.process.send_signal(signal.SIGCONT)
                continue
            self.release()
            taken = self._taken(held)
            if not taken:
                self.hold()
            trainer.process.send_signal(signal.SIGCONT)
            if taken:
                _wait_for(refused + 1, lambda: _refused(trainer.output), "refused acks")  # noqa: B023
                return
        raise AssertionError("no group was taken from a frozen trainer")

    def num_refused(self) -> int:
        return sum(map(_refused, self._outputs))

    def is_alive(self) -> bool:
        return all(trainer.process.poll() is None for trainer in self.trainers)

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.process.kill()
            trainer.process.wait()

    def _holder(self, is_wanted: Callable[[Trainer], bool] = lambda _: True) -> Trainer:
        """Wait for a trainer that holds groups and keeps them: acks are prevented."""

        def holders() -> list[Trainer]:
            return [one for one in filter(is_wanted, self.trainers) if one.has_claimed() and self._held_by(one)]

        return self._rng.choice(wait_until(holders, "a trainer holds groups", PATIENCE_SECONDS))

    def _taken(self, held: set[tuple[int, int]]) -> bool:
        """Wait until another trainer has claimed one of the groups; return False if none does.

        A trainer that was stopped while it renewed its lease holds SQLite's only lock.
        """
        deadline = time.monotonic() + 3 * LEASE_SECONDS
        columns = schema.groups.c
        while time.monotonic() < deadline:
            with self._database.read() as connection:
                tokens = connection.execute(sa.select(columns.group_pk, columns.fencing_token)).all()
            now = {row.group_pk: row.fencing_token for row in tokens}
            if any(now[group_pk] > token for group_pk, token in held):
                return True
            time.sleep(0.02)
        return False

    def _held_by(self, trainer: Trainer) -> set[tuple[int, int]]:
        columns = schema.groups.c
        with self._database.read() as connection:
            held = sa.select(columns.group_pk, columns.fencing_token).where(
                columns.trainer_id == trainer.name, columns.status == "claimed"
            )
            return {(row.group_pk, row.fencing_token) for row in connection.execute(held)}


def _refused(output: Path) -> int:
    return output.read_text().count("refused")


def _wait_for(expected: int, count: Callable[[], int], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := count()) < expected:
        assert time.monotonic() < deadline, f"{found} of {expected} {what}"
        time.sleep(0.05)


def _start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


def fill(database: Database, num_experiences: int) -> list[str]:
    """Write sessions of one turn, in groups, none of them finished yet; return the turns' ids."""
    names = [f"s{number}" for number in range(num_experiences)]
    tokens = np.array([1, 2], np.int32)
    for start in range(0, num_experiences, SESSIONS_A_TRANSACTION):
        chunk = range(start, min(start + SESSIONS_A_TRANSACTION, num_experiences))
        with database.write() as connection:
            for number in chunk:
                group_id = f"g{number // GROUP_SIZE}"
                session = Session(session_id=names[number], group_id=group_id, group_size=GROUP_SIZE)
                sessions.create_session(connection, session)
            turns = [
                Turn(
                    turn_id=f"{names[number]}-turn",
                    session_id=names[number],
                    chain_id=f"{names[number]}-turn",
                    prompt_delta=tokens,
                    prompt_length=2,
                    token_ids=tokens,
                    logprobs=np.array([-1, -1], np.float32),
                )
                for number in chunk
            ]
            append_turns(connection, turns)
    return [f"{name}-turn" for name in names]


def finish(database: Database, numbers: range) -> None:
    """Reward and end sessions, so that their groups can be claimed."""
    with database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id=f"s{number}", value=1.0) for number in numbers])
        for number in numbers:
            sessions.end_session(connection, "default", f"s{number}")


def acked(database: Database) -> Counter[str]:
    counts: Counter[str] = Counter()
    after = None
    has_more = True
    while has_more:
        with database.read() as connection:
            page, has_more = updates.list_updates(connection, after=after)
        for record in page:
            counts.update(record.metrics)
        after = page[-1].update_id if page else after
    return counts


@contextlib.contextmanager
def under_fire(
    database: Database, url: str, directory: Path, num_trainers: int
) -> Iterator[tuple[Crew, DatabaseClock]]:
    clock = DatabaseClock(database, directory)
    crew = Crew(database, url, clock, directory, num_trainers)
    try:
        yield crew, clock
    finally:
        crew.close()


def num_trained(database: Database) -> int:
    with database.read() as connection:
        return overview.count_rows(connection).groups.get("trained", 0)


@pytest.mark.parametrize(
    ("num_trainers", "num_experiences", "num_rounds"),
    [(3, 300, 1), pytest.param(8, 10_000, 6, marks=pytest.mark.slow)],
)
def test_every_experience_is_acked_exactly_once_under_kills_stops_and_clock_jumps(
    database, database_url, tmp_path, num_trainers, num_experiences, num_rounds
):
    turn_ids = fill(database, num_experiences)
    with under_fire(database, database_url, tmp_path, num_trainers) as (crew, clock):
        jumps = itertools.cycle(JUMPS)

        def jump() -> None:
            clock.jump(next(jumps))
            crew.release()

        faults = [crew.kill_and_restart, crew.freeze_beyond_the_lease, jump]
        waves = np.array_split(np.arange(num_experiences // GROUP_SIZE), num_rounds * len(faults) + 1)
        for number, wave in enumerate(waves):
            _wait_for(int(wave[0]), lambda: num_trained(database), "groups trained")
            crew.hold()
            finish(database, range(GROUP_SIZE * int(wave[0]), GROUP_SIZE * (int(wave[-1]) + 1)))
            if number < len(waves) - 1:
                faults[number % len(faults)]()
        crew.kill_without_restart()
        clock.jump(LAST_JUMP)
        _wait_for(num_experiences // GROUP_SIZE, lambda: num_trained(database), "groups trained")
        assert crew.is_alive()
        refused = crew.num_refused()
    counts = acked(database)
    with database.read() as connection:
        claimed_again = connection.execute(
            sa.select(sa.func.count()).select_from(schema.groups).where(schema.groups.c.fencing_token > 1)
        ).scalar_one()
    print(
        f"\n{database.dialect}: {num_trainers} trainers, {num_experiences} experiences, {num_rounds} kills with "
        f"restart and 1 without, {num_rounds} freezes, {num_rounds + 1} clock jumps: {len(counts)} experiences acked, "
        f"{sum(counts.values())} times in all; {claimed_again} groups claimed more than once, {refused} acks refused"
    )
    assert counts == Counter(turn_ids)
    assert refused >= num_rounds
