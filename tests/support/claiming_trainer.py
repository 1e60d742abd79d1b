"""A trainer process without training: it claims, holds for a moment, and acks, through the trainer's own source.

Its wall clock may be off and may jump while it runs: every reader of the time of day gets a wrong one, Turnwise's code
and SQLite, whose "database's own time" is this process's.

    python claiming_trainer.py URL NAME NUMBER SKEW_SECONDS CLOCK_FILE
"""

import contextlib
import datetime
import itertools
import sys
import time
from collections import Counter
from pathlib import Path

import sqlalchemy as sa

from turnwise import types

LEASE_SECONDS = 1.0
WORK_SECONDS = 0.03
"""How long a batch is held before its ack."""
STALLED_SECONDS = 48 * 3600.0
"""More than any jump of the database's clock, and less than the error of some trainers' own clocks."""
GROUPS_PER_BATCH = 4
IDS_APART = 1000
"""Distance between the first update ids of two trainers, so that their ids never collide."""
JULIAN_DAY_OF_1970 = 2440587.5


class WrongClock:
    """The time of day plus the error of this process and the common error since the last jump."""

    def __init__(self, skew_seconds: float, jumps: Path) -> None:
        self._skew_seconds = skew_seconds
        self._jumps = jumps

    def offset(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._skew_seconds + float(self._jumps.read_text() or 0))

    def now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + self.offset()

    def julian_day(self, _now: str) -> float:
        return self.now().timestamp() / 86400 + JULIAN_DAY_OF_1970


def main(url: str, name: str, number: str, skew_seconds: str, jumps: str) -> None:
    """Claim and ack until the test ends the process; the source gives no batch while no group is ready."""
    clock = WrongClock(float(skew_seconds), Path(jumps))
    types.utc_now = clock.now  # before the modules that import it from there
    from trainer.claims import claims as trainer_source
    from trainer.claims.claims import Claims
    from trainer.claims.ledger import RunProgress
    from trainer.features import Settings
    from trainer.features.pace import Pace
    from trainer.features.stalled import Stalled
    from turnwise.errors import LeaseLost
    from turnwise.features.page.updates import list_updates
    from turnwise.store import claims
    from turnwise.store.database import Database

    database = Database(url, lock_timeout_seconds=60)
    if database.dialect == "sqlite":
        sa.event.listen(
            database._engine,
            "connect",
            lambda connection, _record: connection.create_function("julianday", 1, clock.julian_day),
        )
    rule = Settings(
        trainer_id=name,
        groups_per_batch=GROUPS_PER_BATCH,
        singles_per_group=1,
        wait_seconds=0.0,
        stalled_seconds=STALLED_SECONDS,
        stalled_policy="drop",
    )
    trainer_source.LEASE_SECONDS = LEASE_SECONDS
    source = Claims(database, rule, holds=(Stalled, Pace))
    source.open(types.PolicyVersion(version=0, path="base"), 0)
    with database.read() as connection:
        last = next((each for each in list_updates(connection, limit=10_000)[0] if each.trainer_id == name), None)
    ids = itertools.count(int(number) if last is None else last.update_id + IDS_APART, IDS_APART)
    while (batch := source.next(RunProgress(num_batches=1))) is not None:
        time.sleep(WORK_SECONDS)
        update = types.UpdateRecord(
            update_id=next(ids),
            trainer_id=name,
            policy_version=0,
            num_groups=len(batch.claim.groups),
            num_sessions=len(batch.experiences),
            num_tokens=0,
            metrics=Counter(turn_id for one in batch.experiences for turn_id in one.turn_ids),
        )
        with contextlib.suppress(LeaseLost):
            source.ack([claims.Finished(batch.claim, update)])


if __name__ == "__main__":
    main(*sys.argv[1:])
