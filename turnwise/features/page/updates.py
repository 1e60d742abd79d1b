"""Updates as people read them: with the groups and the sessions of one tenant.

The trainer's own metrics are of all tenants; groups and rewards are of one tenant.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from turnwise.credit import SessionCredit, assign_credit
from turnwise.store import rows
from turnwise.store.rewards import rewards_of
from turnwise.store.schema import groups, sessions, trained_sessions, updates
from turnwise.store.selection import is_shown_to
from turnwise.store.statements import PAGE_BYTES, read_page, size_of
from turnwise.store.updates import Advantages
from turnwise.types import Credit, GroupStatus, UpdateRecord

_ITEM_BYTES = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSession:
    """One session of an update."""

    session_id: str
    group_id: str
    advantages: Advantages
    """The advantage of each turn that was trained, by turn id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """One group of an update."""

    group_id: str
    status: GroupStatus
    """`trained`, or `dropped` if none of its turns was trained."""
    reason: str | None
    """Why it was dropped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateView:
    """An update with one tenant's groups and sessions in it."""

    update: UpdateRecord
    groups: tuple[UpdateGroup, ...]
    sessions: tuple[TrainedSession, ...]


def list_updates(
    conn: sa.Connection,
    *,
    limit: int = 100,
    after: int | None = None,
    tenant: str | None = None,
    max_bytes: int | None = None,
) -> tuple[list[UpdateRecord], bool]:
    """Return updates below `after`, newest first, and whether there are more.

    With a tenant only those of the policies that it may read. With `max_bytes` a page ends
    before its limit where the updates, with their groups and sessions, have more bytes.
    """
    held = updates.c
    found = sa.select(updates).order_by(held.update_id.desc())
    if after is not None:
        found = found.where(held.update_id < after)
    if tenant is not None:
        found = found.where(is_shown_to(tenant, held.policy_id))
    page, has_more = read_page(conn, found, limit, size=_size(conn.dialect), max_bytes=max_bytes)
    return [rows.UPDATES.record(row) for row in page], has_more


def _size(dialect: sa.Dialect) -> sa.ColumnElement[int]:
    num_groups = sa.select(sa.func.count()).where(groups.c.update_id == updates.c.update_id)
    of_sessions = sa.select(
        sa.func.coalesce(sa.func.sum(size_of(dialect, trained_sessions.c.advantages) + _ITEM_BYTES), 0)
    ).where(trained_sessions.c.update_id == updates.c.update_id)
    own = size_of(dialect, updates.c.metrics)
    return own + _ITEM_BYTES * num_groups.scalar_subquery() + of_sessions.scalar_subquery()


def list_update_views(
    conn: sa.Connection, tenant: str, *, limit: int = 100, after: int | None = None, max_bytes: int = PAGE_BYTES
) -> tuple[list[UpdateView], bool]:
    """Return updates below `after` of the policies that a tenant may read, with its groups and sessions, newest first.

    Returns:
        A page of at most `max_bytes`, and whether there are more.
    """
    records, has_more = list_updates(conn, limit=limit, after=after, tenant=tenant, max_bytes=max_bytes)
    ids = [record.update_id for record in records]
    in_update, of_update = groups_of(conn, tenant, ids), _sessions_in(conn, tenant, ids)
    views = [
        UpdateView(
            update=record, groups=tuple(in_update[record.update_id]), sessions=tuple(of_update[record.update_id])
        )
        for record in records
    ]
    return views, has_more


def groups_of(conn: sa.Connection, tenant: str, update_ids: Sequence[int]) -> Mapping[int, list[UpdateGroup]]:
    """Return one tenant's groups in these updates, by update."""
    found = conn.execute(
        sa.select(groups.c.update_id, groups.c.group_id, groups.c.status, groups.c.reason)
        .where(groups.c.update_id.in_(update_ids), groups.c.tenant == tenant)
        .order_by(groups.c.group_pk)
    )
    return rows.by_key(
        found,
        "update_id",
        lambda row: UpdateGroup(group_id=row.group_id, status=GroupStatus(row.status), reason=row.reason),
    )


def _sessions_in(conn: sa.Connection, tenant: str, update_ids: Sequence[int]) -> Mapping[int, list[TrainedSession]]:
    found = conn.execute(
        sa.select(
            trained_sessions.c.update_id, sessions.c.session_id, sessions.c.group_id, trained_sessions.c.advantages
        )
        .join_from(trained_sessions, sessions)
        .where(trained_sessions.c.update_id.in_(update_ids), sessions.c.tenant == tenant)
        .order_by(trained_sessions.c.session_pk)
    )
    return rows.by_key(
        found,
        "update_id",
        lambda row: TrainedSession(
            session_id=row.session_id,
            group_id=row.group_id or row.session_id,
            advantages=json.loads(row.advantages),
        ),
    )


class Judged(NamedTuple):
    """A rewarded session of an update."""

    task_id: str | None
    is_single: bool
    """Whether it has no group, as live traffic, which is compared with other single sessions."""
    credit: SessionCredit


def judged_sessions(conn: sa.Connection, tenant: str, update_id: int) -> list[Judged]:
    """Return each rewarded session of a tenant's groups in an update."""
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.task_id, sessions.c.group_id, sessions.c.credit)
        .join_from(groups, sessions, sa.func.coalesce(groups.c.part_of, groups.c.group_pk) == sessions.c.group_pk)
        .where(groups.c.update_id == update_id, groups.c.tenant == tenant, sessions.c.num_rewards > 0)
    ).all()
    lines = rewards_of(conn, [row.session_pk for row in found])
    return [
        Judged(row.task_id, row.group_id is None, assign_credit([], lines[row.session_pk], Credit(row.credit)))
        for row in found
    ]
