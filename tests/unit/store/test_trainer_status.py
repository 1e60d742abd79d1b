"""`GET /v1/counts` returns the reports of the trainers."""

from __future__ import annotations

import datetime

from turnwise.store import queries
from turnwise.store.database import Database
from turnwise.store.trainer_status import TrainerStatus, report_status

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def status(trainer_id: str, text: str, minute: int) -> TrainerStatus:
    at = NOON + datetime.timedelta(minutes=minute)
    return TrainerStatus(trainer_id=trainer_id, text=text, starts_at=at, reported_at=at)


def test_the_last_report_of_each_trainer_is_returned_newest_first(database: Database) -> None:
    with database.write() as connection:
        for each in (status("a", "1 of 4", 0), status("b", "2 of 4", 1), status("a", "3 of 4", 2)):
            report_status(connection, each)
    with database.read() as connection:
        found = queries.counts(connection, "default").trainers
    assert found == [status("a", "3 of 4", 2), status("b", "2 of 4", 1)]
