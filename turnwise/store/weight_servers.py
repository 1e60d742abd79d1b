"""Where trainers hand out the weights that they hold in memory."""

from __future__ import annotations

import datetime

import sqlalchemy as sa

from turnwise.store.rows import to_micros
from turnwise.store.tables import weight_servers as table


def announce_weights(conn: sa.Connection, trainer_id: str, url: str | None, now: datetime.datetime) -> None:
    """Store the address of a trainer's weights; None removes it."""
    conn.execute(sa.delete(table).where(table.c.trainer_id == trainer_id))
    if url is not None:
        conn.execute(sa.insert(table).values(trainer_id=trainer_id, url=url, announced_at=to_micros(now)))


def weight_urls(conn: sa.Connection) -> list[str]:
    """Return the addresses of all trainers' weights, the latest announcement first."""
    return list(conn.execute(sa.select(table.c.url).order_by(table.c.announced_at.desc())).scalars())
