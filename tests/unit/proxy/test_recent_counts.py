"""The counts of large tenants are kept for a time that grows with their size; those of small ones are always read."""

from __future__ import annotations

import asyncio

from support.ledger_samples import add_session

from proxy.limits.counts import RecentCounts
from turnwise.store import rows, tables
from turnwise.store.database import Database
from turnwise.store.statements import insert_rows
from turnwise.store.trainer_status import TrainerStatus, report_status
from turnwise.types import UpdateRecord, utc_now


async def test_a_large_tenant_is_counted_again_after_a_second_for_every_rows_per_second(database: Database) -> None:
    """Two sessions in two groups are four rows: at one row a second they are counted every four seconds."""
    now = 100.0
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: now)
    for session_id in ("a", "b"):
        add_session(database, session_id)
    first = await counts.read("default")
    assert first.counts.sessions == {"open": 2}
    add_session(database, "c")
    now = 103.9
    kept = await counts.read("default")
    assert (kept.counts, kept.counted_at) == (first.counts, first.counted_at)
    now = 104.0
    again = await counts.read("default")
    assert again.counts.sessions == {"open": 3}
    assert again.counted_at > first.counted_at


async def test_a_small_tenant_is_always_counted(database: Database) -> None:
    """Four rows are no more than what is counted in a second."""
    counts = RecentCounts(database, rows_per_second=4)
    for num_sessions, session_id in enumerate(("a", "b"), start=1):
        add_session(database, session_id)
        assert (await counts.read("default")).counts.sessions == {"open": num_sessions}
    add_session(database, "theirs", tenant="b")
    assert (await counts.read("b")).counts.sessions == {"open": 1}


async def test_counting_many_updates_is_bounded_for_a_small_tenant_too(database: Database) -> None:
    """One session, its group and three updates are five rows: at one row a second they are counted every 5 s."""
    now = 0.0
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: now)
    add_session(database, "a")
    store_updates(database, 1, 2, 3)
    assert (await counts.read("default")).counts.num_updates == 3
    store_updates(database, 4)
    now = 4.9
    assert (await counts.read("default")).counts.num_updates == 3
    now = 5.0
    assert (await counts.read("default")).counts.num_updates == 4


def store_updates(database: Database, *numbers: int) -> None:
    sizes = {"num_groups": 1, "num_sessions": 1, "num_tokens": 1}
    updates = [UpdateRecord(update_id=number, trainer_id="t", policy_version=number, **sizes) for number in numbers]
    with database.write() as connection:
        insert_rows(connection, tables.updates, list(map(rows.UPDATES.row, updates)))


async def test_kept_counts_hold_the_newest_reports_of_trainers(database: Database) -> None:
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: 0.0)
    add_session(database, "a")
    assert (await counts.read("default")).counts.trainers == []
    status = TrainerStatus(trainer_id="one", text="trains", starts_at=None, reported_at=utc_now())
    with database.write() as connection:
        report_status(connection, status)
    assert (await counts.read("default")).counts.trainers == [status]


async def test_a_tenant_whose_counts_are_forgotten_is_counted_again(database: Database) -> None:
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: 0.0)
    add_session(database, "a")
    await counts.read("default")
    add_session(database, "b")
    counts.forget("default")
    assert (await counts.read("default")).counts.sessions == {"open": 2}


async def test_readers_at_the_same_time_share_one_count_of_a_large_tenant(database: Database) -> None:
    now = 0.0
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: now)
    add_session(database, "a")
    await counts.read("default")
    now = 60.0
    found = await asyncio.gather(*(counts.read("default") for _ in range(5)))
    assert len({each.counted_at for each in found}) == 1
