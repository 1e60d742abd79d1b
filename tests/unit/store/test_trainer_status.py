"""`GET /v1/counts` returns the reports of the trainers."""

from __future__ import annotations

import datetime

from turnwise.store.database import Database
from turnwise.store.processes import SILENT_SECONDS, TrainerState, TrainerStatus, report_status, trainer_statuses

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def status(trainer_id: str, text: str, minute: int, state: TrainerState = TrainerState.RUNNING) -> TrainerStatus:
    at = NOON + datetime.timedelta(minutes=minute)
    return TrainerStatus(trainer_id=trainer_id, text=text, state=state, starts_at=at, reported_at=at)


def test_the_last_report_of_each_trainer_is_returned_newest_first(database: Database) -> None:
    with database.write() as connection:
        for each in (status("a", "1 of 4", 0), status("b", "2 of 4", 1), status("a", "3 of 4", 2)):
            report_status(connection, each)
        found = trainer_statuses(connection, now=NOON + datetime.timedelta(minutes=2))
    assert found == [status("a", "3 of 4", 2), status("b", "2 of 4", 1)]


def test_only_a_trainer_that_said_nothing_at_its_end_is_silent_after_a_minute(database: Database) -> None:
    with database.write() as connection:
        for name, state in (("killed", "running"), ("ended", "stopped"), ("failed", "died")):
            report_status(connection, status(name, name, 0, TrainerState(state)))
        found = trainer_statuses(connection, now=NOON + datetime.timedelta(seconds=SILENT_SECONDS + 1))
    assert {each.trainer_id: each.state.value for each in found} == {
        "killed": "silent",
        "ended": "stopped",
        "failed": "died",
    }
