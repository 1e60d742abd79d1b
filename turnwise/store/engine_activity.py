"""The seconds in which each engine served and ran calls: one row for each engine and minute.

A second is one bit, so the seconds that several proxy processes observed are combined by OR, and storing the same
seconds again changes nothing.
"""

from __future__ import annotations

import bisect
import datetime
from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa

from turnwise.store.statements import insert_ignoring
from turnwise.store.tables import engine_minutes as table

SECONDS = 60
KEPT_MINUTES = 30 * 24 * 60
"""Minutes after which rows are deleted: 30 days."""
Period = tuple[datetime.datetime, datetime.datetime]
"""Its begin and its end."""


class Activity(NamedTuple):
    """The seconds of one minute, second 0 as the lowest bit."""

    served: int
    """Seconds in which the engine took calls."""
    busy: int
    """Seconds in which a call ran."""


def add_activity(conn: sa.Connection, seen: Mapping[tuple[int, str], Activity]) -> None:
    """Add seconds to the rows of minute (since 1970) and engine, and delete rows that are too old."""
    for (minute, engine), activity in sorted(seen.items()):
        if not insert_ignoring(conn, table, {"minute": minute, "engine": engine, **activity._asdict()}):
            conn.execute(
                sa.update(table)
                .where(table.c.minute == minute, table.c.engine == engine)
                .values(served=table.c.served.bitwise_or(activity.served), busy=table.c.busy.bitwise_or(activity.busy))
            )
    if seen:
        newest, _ = max(seen)
        conn.execute(sa.delete(table).where(table.c.minute < newest - KEPT_MINUTES))


def idle_shares(conn: sa.Connection, periods: Mapping[int, Period]) -> dict[int, float | None]:
    """Return for each period the share of the engines' serving seconds in which no call ran.

    None for a period in which no engine served or nothing was observed.
    """
    if not periods:
        return {}
    bounds = {key: (int(begin.timestamp()), int(end.timestamp())) for key, (begin, end) in periods.items()}
    first, last = min(begin for begin, _ in bounds.values()), max(end for _, end in bounds.values())
    found = conn.execute(
        sa.select(table.c.minute, table.c.served, table.c.busy)
        .where(table.c.minute.between(first // SECONDS, last // SECONDS))
        .order_by(table.c.minute)
    ).all()
    minutes = [row.minute for row in found]

    def share(begin: int, end: int) -> float | None:
        low, high = (bisect.bisect_left(minutes, begin // SECONDS), bisect.bisect_right(minutes, end // SECONDS))
        num_served = num_idle = 0
        for row in found[low:high]:
            served = row.served & _bits(begin - SECONDS * row.minute, end - SECONDS * row.minute)
            num_served += served.bit_count()
            num_idle += (served & ~row.busy).bit_count()
        return num_idle / num_served if num_served else None

    return {key: share(*each) for key, each in bounds.items()}


def _bits(begin: int, end: int) -> int:
    """Return the bits of the seconds from `begin` to before `end`, both counted from the start of a minute."""
    low, high = max(begin, 0), min(end, SECONDS)
    return (1 << high) - (1 << low) if high > low else 0
