"""The seconds in which each engine served and ran calls, and the shares in which it was idle.

They have one row for each engine and minute. A second is one bit, so the seconds that several proxy processes observed
are combined by OR, and storing the same again changes nothing.
"""

from __future__ import annotations

import bisect
import datetime
from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa

from turnwise.store.schema import metadata
from turnwise.store.statements import insert_ignoring

MINUTE_SECONDS = 60
KEPT_MINUTES = 30 * 24 * 60
Period = tuple[datetime.datetime, datetime.datetime]
engine_minutes = sa.Table(
    "engine_minutes",
    metadata,
    sa.Column("minute", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("engine", sa.Text, primary_key=True),
    sa.Column("served", sa.BigInteger, nullable=False),
    sa.Column("busy", sa.BigInteger, nullable=False),
)


class Activity(NamedTuple):
    """The seconds of one minute, second 0 as the lowest bit."""

    served: int
    busy: int


def add_activity(conn: sa.Connection, seen: Mapping[tuple[int, str], Activity]) -> None:
    """Add seconds to the rows of minute (since 1970) and engine, and delete rows that are too old."""
    for (minute, engine), activity in sorted(seen.items()):
        if not insert_ignoring(conn, engine_minutes, {"minute": minute, "engine": engine, **activity._asdict()}):
            conn.execute(
                sa.update(engine_minutes)
                .where(engine_minutes.c.minute == minute, engine_minutes.c.engine == engine)
                .values(
                    served=engine_minutes.c.served.bitwise_or(activity.served),
                    busy=engine_minutes.c.busy.bitwise_or(activity.busy),
                )
            )
    if seen:
        newest, _ = max(seen)
        conn.execute(sa.delete(engine_minutes).where(engine_minutes.c.minute < newest - KEPT_MINUTES))


def idle_shares(conn: sa.Connection, periods: Mapping[int, Period]) -> dict[int, float | None]:
    """Return for each period the share of the engines' serving seconds in which no call ran.

    None for a period in which no engine served or nothing was observed.
    """
    if not periods:
        return {}
    bounds = {key: (int(begin.timestamp()), int(end.timestamp())) for key, (begin, end) in periods.items()}
    first, last = min(begin for begin, _ in bounds.values()), max(end for _, end in bounds.values())
    found = conn.execute(
        sa.select(engine_minutes.c.minute, engine_minutes.c.served, engine_minutes.c.busy)
        .where(engine_minutes.c.minute.between(first // MINUTE_SECONDS, last // MINUTE_SECONDS))
        .order_by(engine_minutes.c.minute)
    ).all()
    minutes = [row.minute for row in found]

    def share(begin: int, end: int) -> float | None:
        low, high = (
            bisect.bisect_left(minutes, begin // MINUTE_SECONDS),
            bisect.bisect_right(minutes, end // MINUTE_SECONDS),
        )
        num_served = num_idle = 0
        for row in found[low:high]:
            served = row.served & _bits(begin - MINUTE_SECONDS * row.minute, end - MINUTE_SECONDS * row.minute)
            num_served += served.bit_count()
            num_idle += (served & ~row.busy).bit_count()
        return num_idle / num_served if num_served else None

    return {key: share(*each) for key, each in bounds.items()}


def _bits(begin: int, end: int) -> int:
    low, high = max(begin, 0), min(end, MINUTE_SECONDS)
    return (1 << high) - (1 << low) if high > low else 0
