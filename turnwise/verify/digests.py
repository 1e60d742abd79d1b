"""Every turn, reward line, trained batch and published version against the digest that was recorded with it."""

from __future__ import annotations

from turnwise.store import rows, search, updates
from turnwise.store.database import Connection
from turnwise.types import UpdateRecord
from turnwise.verify.report import Report


def check_record(record: search.SessionRecord, report: Report) -> None:
    """Check the turns and the reward lines of a session."""
    session = f"session {record.session.session_id!r}"
    for turn in record.turns:
        recomputed = rows.turn_row(turn, 0)["digest"]
        _compare(turn.digest, recomputed, "turns", f"{session} turn {turn.turn_id!r}", report)
    for line in record.rewards:
        recomputed = rows.reward_row(line, 0)["digest"]
        _compare(line.digest, recomputed, "reward lines", f"{session} reward line {line.reward_id}", report)


def _compare(stored: bytes | None, recomputed: bytes, what: str, place: str, report: Report) -> None:
    report.checked[f"digests of {what}"] += 1
    if stored != recomputed:
        report.add("digest", place, "has no digest" if stored is None else "was changed after it was stored")


def check_update(conn: Connection, update: UpdateRecord, report: Report) -> None:
    """Check that an update's turns and advantages are those that it was recorded with."""
    if update.batch_digest is None:
        report.not_checked["updates that trained nothing, or deleted turns"] += 1
        return
    trained = updates.trained_digests(conn, update.update_id)
    if len(trained) < update.num_sessions:
        report.not_checked["updates with deleted sessions"] += 1
        return
    report.checked["updates"] += 1
    before = report.num_mismatches
    for (tenant, session_id), (recorded_digest, recomputed) in trained.items():
        if recorded_digest != recomputed:
            place = f"update {update.update_id} session {session_id!r} of tenant {tenant!r}"
            report.add("digest", place, "its trained turns or their advantages were changed")
    recorded = rows.batch_digest({key: each for key, (each, _) in trained.items()})
    if recorded != update.batch_digest and report.num_mismatches == before:
        report.add("digest", f"update {update.update_id} batch_digest", "is not that of its sessions")
