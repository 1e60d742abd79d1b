"""What trainers report, and what they keep between batches.

A trainer reports in words, and a thread of its process renews `seen_at`. One that stops or fails says so; one that was
killed says nothing, and counts as silent after a while. The trainer `NAME/3` trains the policy with the number 3: of
all tenants only the one that owns the policy sees its report.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from collections.abc import Collection, Iterable
from typing import Any

import sqlalchemy as sa

from turnwise.store.database import clock
from turnwise.store.rows import RowFormat, StoredRow, dump
from turnwise.store.schema import policies, trainer_states, trainer_status
from turnwise.types import DEFAULT_POLICY, GroupKey, Json, SessionKey, name_digest

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A trainer without a sign of life for this long counts as silent."""


class TrainerState(enum.StrEnum):
    """State of a trainer."""

    RUNNING = "running"
    BLOCKED = "blocked"
    """It runs, and waits for a person: engines refused its last versions."""
    STOPPED = "stopped"
    DIED = "died"
    SILENT = "silent"
    """Neither ended nor seen for a minute: it was killed, or cannot reach the database."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """The last report of a trainer."""

    trainer_id: str
    text: str
    """One line, such as `4 of 32 groups are ready`; its error if it died."""
    state: TrainerState = TrainerState.RUNNING
    """`running` or `stopped`; `blocked` after several versions that engines refused, `died` with an error, or `silent`
    without a sign of life for a minute."""
    starts_at: datetime.datetime | None = None
    """When the next batch starts even if it is not full; None if the trainer waits for more groups or trains."""
    reported_at: datetime.datetime


_STATUSES = RowFormat(TrainerStatus, trainer_status)


def report_status(
    conn: sa.Connection,
    trainer_id: str,
    text: str,
    state: TrainerState = TrainerState.RUNNING,
    *,
    seconds_left: float | None = None,
    now: datetime.datetime | None = None,
) -> None:
    """Replace a trainer's last report; its next batch starts after these seconds. `now` replaces the time in tests."""
    instant = clock(conn, now)
    starts_at = None if seconds_left is None else instant + int(max(seconds_left, 0.0) * 1e6)
    values = {"text": text, "state": state.value, "starts_at": starts_at, "reported_at": instant, "seen_at": instant}
    delete_report(conn, trainer_id)
    conn.execute(sa.insert(trainer_status).values(trainer_id=trainer_id, **values))


def delete_report(conn: sa.Connection, trainer_id: str) -> None:
    conn.execute(sa.delete(trainer_status).where(trainer_status.c.trainer_id == trainer_id))


def note_sign_of_life(conn: sa.Connection, trainer_id: str) -> None:
    conn.execute(sa.update(trainer_status).where(trainer_status.c.trainer_id == trainer_id).values(seen_at=clock(conn)))


def trainer_statuses(
    conn: sa.Connection, tenant: str | None = None, now: datetime.datetime | None = None
) -> list[TrainerStatus]:
    """Return the last report of each trainer, newest first; with a tenant, without those of other tenants' policies."""
    found = conn.execute(sa.select(trainer_status).order_by(trainer_status.c.reported_at.desc())).all()
    if not found:
        return []
    if tenant is not None:
        is_other = policies.c.policy_id != DEFAULT_POLICY, policies.c.tenant != tenant
        hidden = {str(number) for number in conn.execute(sa.select(policies.c.policy_id).where(*is_other)).scalars()}
        found = [row for row in found if row.trainer_id.rpartition("/")[2] not in hidden or "/" not in row.trainer_id]
    seen_since = clock(conn, now) - SILENT_SECONDS * 1_000_000
    return [_status(row, seen_since) for row in found]


def _status(row: StoredRow, seen_since: float) -> TrainerStatus:
    status = _STATUSES.record(row)
    is_silent = status.state in {TrainerState.RUNNING, TrainerState.BLOCKED} and row.seen_at < seen_since
    return dataclasses.replace(status, state=TrainerState.SILENT) if is_silent else status


def keep_state(conn: sa.Connection, policy_id: int, state: Json) -> None:
    """Replace what a policy's last batch left that no checkpoint holds; an empty state removes it.

    Each of its values is a list of rows, which name groups and sessions by digests.
    """
    conn.execute(sa.delete(trainer_states).where(trainer_states.c.policy_id == policy_id))
    if state:
        conn.execute(sa.insert(trainer_states).values(policy_id=policy_id, state=dump(state)))


def kept_state(conn: sa.Connection, policy_id: int) -> Json | None:
    found = conn.execute(sa.select(trainer_states.c.state).where(trainer_states.c.policy_id == policy_id))
    text = found.scalar_one_or_none()
    return None if text is None else json.loads(text)


def forget_in_states(conn: sa.Connection, sessions: Collection[SessionKey], groups: Collection[GroupKey]) -> None:
    """Remove deleted sessions and groups from what trainers keep."""
    gone = {name_digest(key) for key in (*sessions, *groups)}
    for row in conn.execute(sa.select(trainer_states).with_for_update()).all():
        state = json.loads(row.state)
        left = {name: [each for each in kept if gone.isdisjoint(_digests(each))] for name, kept in state.items()}
        if left != state:
            keep_state(conn, row.policy_id, left)


def _digests(row: Json | list[Any]) -> Iterable[str]:
    return (each for each in (row.values() if isinstance(row, dict) else row) if isinstance(each, str))
