"""The current status of each trainer as text, for the dashboard and for `GET /v1/counts`."""

from __future__ import annotations

import dataclasses
import datetime

import sqlalchemy as sa

from turnwise.store.database import from_micros, to_micros
from turnwise.store.tables import trainer_status as table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """The last report of a trainer."""

    trainer_id: str
    text: str
    """One line, such as `4 of 32 groups are ready`."""
    starts_at: datetime.datetime | None = None
    """When the next batch starts even if it is not full; None if the trainer waits for more groups or trains."""
    reported_at: datetime.datetime


def report_status(conn: sa.Connection, status: TrainerStatus) -> None:
    """Replace the trainer's last report."""
    conn.execute(sa.delete(table).where(table.c.trainer_id == status.trainer_id))
    conn.execute(
        sa.insert(table).values(
            trainer_id=status.trainer_id,
            text=status.text,
            starts_at=None if status.starts_at is None else to_micros(status.starts_at),
            reported_at=to_micros(status.reported_at),
        )
    )


def trainer_statuses(conn: sa.Connection) -> list[TrainerStatus]:
    """Return the last report of each trainer, newest first."""
    found = conn.execute(sa.select(table).order_by(table.c.reported_at.desc()))
    return [
        TrainerStatus(
            trainer_id=row.trainer_id,
            text=row.text,
            starts_at=None if row.starts_at is None else from_micros(row.starts_at),
            reported_at=from_micros(row.reported_at),
        )
        for row in found
    ]
