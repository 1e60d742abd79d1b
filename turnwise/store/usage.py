"""Tokens that keys used, by UTC day. Token budgets are counted from these rows, so restarts and pruning keep them.

Usage is recorded only while budgets are set. One row for each key and day keeps the table small.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import sqlalchemy as sa

from turnwise.store.statements import insert_ignoring
from turnwise.store.tables import token_usage

EPOCH = datetime.date(1970, 1, 1)


def day_of(instant: datetime.datetime) -> int:
    """Return the UTC day of an instant, in days since 1970."""
    return (instant.astimezone(datetime.UTC).date() - EPOCH).days


def add_usage(conn: sa.Connection, amounts: Mapping[tuple[str, str, int], int]) -> None:
    """Add tokens to the rows of tenant, key and day."""
    for (tenant, key_id, day), num_tokens in sorted(amounts.items()):
        insert_ignoring(conn, token_usage, {"tenant": tenant, "key_id": key_id, "day": day, "num_tokens": 0})
        conn.execute(
            sa.update(token_usage)
            .where(token_usage.c.tenant == tenant, token_usage.c.key_id == key_id, token_usage.c.day == day)
            .values(num_tokens=token_usage.c.num_tokens + num_tokens)
        )


def used_by_key(
    conn: sa.Connection, tenant: str | None = None, key_id: str | None = None, *, since_day: int | None = None
) -> dict[str, int]:
    """Return the tokens that each key used from a day on, of one key, of one tenant or of all."""
    c = token_usage.c
    found = sa.select(c.key_id, sa.func.sum(c.num_tokens)).group_by(c.key_id)
    for column, value in ((c.tenant, tenant), (c.key_id, key_id)):
        found = found if value is None else found.where(column == value)
    if since_day is not None:
        found = found.where(c.day >= since_day)
    return {key_id: int(num_tokens) for key_id, num_tokens in conn.execute(found)}
