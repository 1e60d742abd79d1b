"""What keys have used of budgets: the tokens of each UTC day, and how lists of keys show their sum."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping
from typing import Any

import sqlalchemy as sa

from turnwise.store.extensions import Column, Extension, ReadColumn
from turnwise.store.schema import metadata
from turnwise.store.statements import insert_ignoring

EPOCH = datetime.date(1970, 1, 1)
token_usage = sa.Table(
    "token_usage",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("num_tokens", sa.BigInteger, nullable=False),
)
"""Prompt and sampled tokens of each key by UTC day, in days since 1970."""


def day_of(instant: datetime.datetime) -> int:
    return (instant.astimezone(datetime.UTC).date() - EPOCH).days


def add_usage(conn: sa.Connection, amounts: Mapping[tuple[str, str, int], int]) -> None:
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


def used_tokens(since_day: Callable[[], int | None]) -> ReadColumn:
    """Return what reads the tokens that keys used, from the day that is in force then."""

    def read(conn: sa.Connection, _: str, tenant: str | None, __: Collection[Any] | None = None) -> Mapping[Any, Any]:
        return used_by_key(conn, tenant, since_day=since_day())

    return read


TOKENS_USED = Column(
    name="tokens_used",
    of=frozenset({"key"}),
    read=used_tokens(lambda: None),
    empty=0,
    kind=int,
    description="Prompt and sampled tokens in the period of the budgets; 0 without budgets.",
    is_always_on=True,
)
EXTENSION = Extension(tables_of_tenants=(token_usage,), columns=(TOKENS_USED,))
