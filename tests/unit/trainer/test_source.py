"""The ledger as the trainer's source: what it hands out, and what it does with groups that never come whole."""

from __future__ import annotations

import time

import pytest
from support.ledger_samples import add_session, finish

from trainer.source import LedgerSource, SourceRule
from turnwise.store import queries
from turnwise.store.database import Database

PATIENCE_SECONDS = 10.0
STALLED_SECONDS = 0.3


def source_for(database: Database, **changes) -> LedgerSource:
    values = {
        "trainer_id": "t",
        "groups_per_batch": 1,
        "wait_seconds": 0.0,
        "lease_seconds": 60.0,
        "poll_seconds": 0.05,
        "stalled_seconds": STALLED_SECONDS,
    }
    return LedgerSource(database, SourceRule(**(values | changes)))


def play_incomplete_group(database: Database) -> None:
    """Write a group of three: one session with a reward, one without, one that never began."""
    for session_id in ("finished", "unfinished"):
        add_session(database, session_id, group_id="g", group_size=3)
    finish(database, "finished")


def groups(database: Database) -> dict[str, int]:
    with database.read() as connection:
        return queries.counts(connection).groups


def test_a_stalled_group_is_trained_on_what_is_finished(database):
    play_incomplete_group(database)
    source = source_for(database, stalled_policy="train")
    started = time.monotonic()
    batch = source.next_batch(0)
    assert time.monotonic() - started > STALLED_SECONDS / 2
    assert [group.group_id for group in batch.claim.groups] == ["g"]
    assert [experience.session_id for experience in batch.experiences] == ["finished"]


def test_a_stalled_group_is_dropped_where_that_is_the_policy(database):
    play_incomplete_group(database)
    source = source_for(database, stalled_policy="drop")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while groups(database) != {"dropped": 1}:
        assert time.monotonic() < deadline
        assert source._num_ready() == 0


@pytest.mark.parametrize("rule", [{"stalled_seconds": None}, {"stalled_seconds": 3600.0}])
def test_an_incomplete_group_is_waited_for_by_default_and_until_it_is_stalled(database, rule):
    play_incomplete_group(database)
    assert source_for(database, **rule)._num_ready() == 0
    assert groups(database) == {"open": 1}
    for session_id in ("unfinished", "third"):
        if session_id == "third":
            add_session(database, session_id, group_id="g", group_size=3)
        finish(database, session_id)
    assert source_for(database, **rule)._num_ready() == 1
