"""The counts of large tenants are kept for a time that grows with their size; those of small ones are always read."""

from __future__ import annotations

from support.ledger_samples import add_session

from proxy.recent_counts import RecentCounts
from turnwise.store.database import Database
from turnwise.store.processes import TrainerStatus, report_status
from turnwise.types import utc_now


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


async def test_kept_counts_hold_the_newest_reports_of_trainers(database: Database) -> None:
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: 0.0)
    add_session(database, "a")
    assert (await counts.read("default")).counts.trainers == []
    status = TrainerStatus(trainer_id="one", text="trains", starts_at=None, reported_at=utc_now())
    with database.write() as connection:
        report_status(connection, status)
    assert (await counts.read("default")).counts.trainers == [status]
