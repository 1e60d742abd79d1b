"""What keys have used of budgets by UTC day, and the limits of a minute and of calls at once that processes share.

Each process holds a share of a limit, and takes a larger one when it needs it, in a transaction that locks the limit's
row: shares are never more than the limit. Time is the database's. A process that dies gives its places back when its
lease ends; the requests that it held count as made.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.store.database import clock
from turnwise.store.extensions import Column, Extension, ReadColumn
from turnwise.store.keys import Key, get_key
from turnwise.store.schema import api_keys, metadata
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
limit_levels = sa.Table(
    "limit_levels",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("requests", sa.Float, nullable=False),
    sa.Column("tokens", sa.Float, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
)
"""What is left of the minute's requests and tokens of a key, or of a tenant under the key "", outside of shares."""
limit_holders = sa.Table(
    "limit_holders",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, primary_key=True),
    sa.Column("num_calls", sa.Integer, nullable=False),
    sa.Column("num_needed", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
)
"""How many calls at once each process may have of a key or tenant, and how many it has that run or wait."""
MINUTE = 60_000_000
"""In microseconds."""
SPARE_PART = 8
"""A process gets an eighth of what nobody needs beside what it needs, so shares become small as a limit is reached."""


class Rule(NamedTuple):
    """The limits of each key, or of each tenant; None for no limit."""

    max_calls: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in self)


class Need(NamedTuple):
    """What one process needs of the limits of a key or tenant."""

    tenant: str
    key_id: str
    """Empty for the tenant's own."""
    rule: Rule
    num_needed: int = 0
    """Its calls that run or wait."""
    num_held: int = 0
    """How many calls at once it goes on to allow; those that run are among them."""
    num_requests: int = 0
    """Requests to take from the minute's; negative for those that are given back."""
    num_tokens: int = 0
    """Tokens that were used and not reported before."""
    is_idle: bool = False
    """Whether the process gives its whole share back."""


class Share(NamedTuple):
    """What one process may use until it asks again."""

    num_calls: int
    """How many calls at once it may have."""
    fair_calls: int
    """How many of them it keeps once it has asked again: others need the rest."""
    num_requests: int
    """Requests that it may make beside those of earlier shares."""
    requests_left: float
    tokens_left: float
    """What all processes together have left of the minute's tokens; negative for a debt."""


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


def settle(conn: sa.Connection, holder: str, seconds: float, needs: Sequence[Need]) -> list[Share]:
    """Take what a process has used and needs no more, and give it what it needs and is left.

    Args:
        conn: A transaction of its own: it locks the limits until its end. Nothing is lost if it is not durable.
        holder: The name of the process.
        seconds: How long its places are its own; all processes must use the same number.
        needs: At most one for each key and tenant.
    """
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql("SET LOCAL synchronous_commit = off")
    instant = clock(conn)
    shares: dict[Need, Share] = {}
    for need in sorted(needs, key=lambda each: each[:2]):  # in one order: processes must not wait for each other
        requests, left, tokens = _take_rates(conn, need, instant)
        places = (0, 0) if need.rule.max_calls is None else _take_places(conn, holder, need, instant, seconds)
        shares[need] = Share(*places, requests, left, tokens)
    return [shares[need] for need in needs]


def _take_rates(conn: sa.Connection, need: Need, instant: int) -> tuple[int, float, float]:
    """Return the requests that a process gets, and the requests and tokens that are left; lock the limits' row."""
    _, most_requests, most_tokens = (0 if limit is None else limit for limit in need.rule)
    table, c = limit_levels, limit_levels.c
    own = c.tenant == need.tenant, c.key_id == need.key_id
    found = sa.select(c.requests, c.tokens, c.updated_at).where(*own).with_for_update()
    row = conn.execute(found).one_or_none()
    if row is None:
        first = {"requests": most_requests, "tokens": most_tokens, "updated_at": instant}
        insert_ignoring(conn, table, {"tenant": need.tenant, "key_id": need.key_id, **first})
        row = conn.execute(found).one()
    # Another process may have read the clock later and come first; a later time is from before the clock was set back.
    since = row.updated_at if row.updated_at <= instant + MINUTE else instant
    minutes = min(1.0, max(0.0, (instant - since) / MINUTE))
    requests = min(most_requests, row.requests + minutes * most_requests - min(0, need.num_requests))
    tokens = min(most_tokens, row.tokens + minutes * most_tokens) - need.num_tokens
    granted = 0
    if need.num_requests > 0:
        granted = min(math.floor(requests), max(need.num_requests, math.ceil(requests / SPARE_PART)))
    requests -= granted
    levels = {"requests": requests, "tokens": tokens, "updated_at": max(instant, since)}
    conn.execute(sa.update(table).where(*own).values(**levels))
    return granted, requests, tokens


def _take_places(conn: sa.Connection, holder: str, need: Need, instant: int, seconds: float) -> tuple[int, int]:
    """Return how many calls at once a process may have, and how many are its part; its limits' row is locked."""
    assert need.rule.max_calls is not None
    table, c = limit_holders, limit_holders.c
    of_limit = c.tenant == need.tenant, c.key_id == need.key_id
    longest = instant + int(2 * seconds * 1e6)  # a later end was written before the clock was set back
    is_over = sa.or_(c.expires_at <= instant, c.expires_at > longest)
    ended = sa.delete(table).where(*of_limit, sa.or_(is_over, c.holder == holder)).returning(c.holder, c.num_calls)
    num_before = sum(each.num_calls for each in conn.execute(ended) if each.holder == holder)
    others = conn.execute(sa.select(c.num_calls, c.num_needed).where(*of_limit)).all()
    if need.is_idle:
        return 0, 0
    free = max(0, need.rule.max_calls - sum(each.num_calls for each in others))
    needs = need.rule.max_calls, need.num_needed, [each.num_needed for each in others]
    others_lack = any(each.num_calls < each.num_needed for each in others)
    fair = fair_part(*needs, divide=math.floor if others_lack else math.ceil)
    granted = need.num_held
    if not (others_lack and num_before > granted):  # a place that is given back is first another's to take
        granted = max(granted, min(free, fair_part(*needs)))
    place = {"tenant": need.tenant, "key_id": need.key_id, "holder": holder}
    held = {"num_calls": granted, "num_needed": need.num_needed, "expires_at": instant + int(seconds * 1e6)}
    conn.execute(sa.insert(table).values(**place, **held))
    return granted, fair


def fair_part(most: int, own: int, others: Sequence[int], *, divide: Callable[[float], int] = math.ceil) -> int:
    """Return one process's part of a limit: what it needs and some more, or as much as each that needs more gets.

    Rounded up, parts together may be more than the limit, and the first ones to ask get theirs. One keeps its part
    rounded down while others lack places, so that each has its turn where a limit is less than there are processes.
    """
    spare = most - own - sum(others)
    if spare >= 0:
        return own + math.ceil(spare / SPARE_PART)
    left, level, needs = most, 0, sorted((own, *others))
    for number, need in enumerate(needs):
        level = max(level, divide(left / (len(needs) - number)))
        if need > level:
            break
        left -= need
    return min(own, level)


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
EXTENSION = Extension(tables_of_tenants=(token_usage, limit_levels, limit_holders), columns=(TOKENS_USED,))


def set_budget(conn: sa.Connection, key_id: str, token_budget: int) -> Key:
    """Set how many prompt and sampled tokens the calls of a key may use; return the key."""
    get_key(conn, key_id)
    conn.execute(sa.update(api_keys).where(api_keys.c.key_id == key_id).values(token_budget=token_budget))
    return get_key(conn, key_id)
