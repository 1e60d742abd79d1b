"""The sessions and turns that each update trained, with their advantages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from turnwise.store import digests, named_policies, pages, rows
from turnwise.store.statements import insert_rows, is_among
from turnwise.store.tables import groups, sessions, trained_sessions, turns, updates
from turnwise.types import GroupStatus, SessionKey, TrainedIn, UpdateRecord

_ITEM_BYTES = 200
"""Bytes of a group or a session in an update, without advantages, roughly."""
Advantages = Mapping[str, float]
"""The advantage of each trained turn, by turn id."""


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


def record_trained(conn: sa.Connection, update: UpdateRecord, trained: Mapping[SessionKey, Advantages]) -> str | None:
    """Store the turns that an update trained, with their advantages; return their digest, None without turns."""
    if not trained:
        return None
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.tenant, sessions.c.session_id).where(
            is_among(conn.dialect, sessions.c.tenant, {tenant for tenant, _ in trained}),
            is_among(conn.dialect, sessions.c.session_id, {session_id for _, session_id in trained}),
        )
    )
    pks = {(row.tenant, row.session_id): row.session_pk for row in found}
    of_turns = _turn_digests(conn, {turn_id for advantages in trained.values() for turn_id in advantages})
    of_sessions = {key: digests.session_digest(advantages, of_turns) for key, advantages in trained.items()}
    insert_rows(
        conn,
        trained_sessions,
        [
            {
                "update_id": update.update_id,
                "session_pk": pks[key],
                "policy_version": update.policy_version,
                "advantages": rows.dump(dict(advantages)),
                "digest": of_sessions[key],
            }
            for key, advantages in trained.items()
            if key in pks  # an imported session, which is not claimed, may have been deleted meanwhile
        ],
    )
    return digests.batch_digest(of_sessions)


def all_updates(conn: sa.Connection) -> list[UpdateRecord]:
    """Return all updates, oldest first."""
    return [rows.UPDATES.record(row) for row in conn.execute(sa.select(updates).order_by(updates.c.update_id))]


def trained_digests(conn: sa.Connection, update_id: int) -> dict[SessionKey, tuple[bytes | None, bytes | None]]:
    """Return the digests of the sessions of an update that are still stored: as recorded with it, and as they are now.

    The recorded one is None if a turn was deleted before the update was recorded.
    """
    found = conn.execute(
        sa.select(sessions.c.tenant, sessions.c.session_id, trained_sessions.c.advantages, trained_sessions.c.digest)
        .join_from(trained_sessions, sessions)
        .where(trained_sessions.c.update_id == update_id)
    ).all()
    advantages: list[dict[str, float]] = [json.loads(row.advantages) for row in found]
    of_turns = _turn_digests(conn, {turn_id for each in advantages for turn_id in each})
    return {
        (row.tenant, row.session_id): (row.digest, digests.session_digest(each, of_turns))
        for row, each in zip(found, advantages, strict=True)
    }


def _turn_digests(conn: sa.Connection, turn_ids: set[str]) -> dict[str, bytes | None]:
    found = conn.execute(
        sa.select(turns.c.turn_id, turns.c.digest).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    )
    return {row.turn_id: row.digest for row in found}


def trained_in(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, list[tuple[TrainedIn, Advantages]]]:
    """Return the updates that trained these sessions, oldest first, with the advantages of their turns."""
    found = conn.execute(
        sa.select(trained_sessions)
        .where(is_among(conn.dialect, trained_sessions.c.session_pk, session_pks))
        .order_by(trained_sessions.c.session_pk, trained_sessions.c.update_id)
    )
    return rows.by_key(
        found,
        "session_pk",
        lambda row: (TrainedIn(update_id=row.update_id, policy_version=row.policy_version), json.loads(row.advantages)),
    )


def last_updates(conn: sa.Connection, tenant: str, session_ids: Sequence[str]) -> dict[str, int]:
    """Return the last update that trained each of these sessions, by session id; untrained sessions are omitted."""
    found = conn.execute(
        sa.select(sessions.c.session_id, sa.func.max(trained_sessions.c.update_id))
        .join_from(sessions, trained_sessions)
        .where(sessions.c.tenant == tenant, is_among(conn.dialect, sessions.c.session_id, set(session_ids)))
        .group_by(sessions.c.session_id)
    )
    return {session_id: update_id for session_id, update_id in found}  # noqa: C416  a Row is a tuple, but not to mypy


def list_updates(
    conn: sa.Connection, tenant: str, *, limit: int = 100, after: int | None = None, max_bytes: int = pages.MAX_BYTES
) -> tuple[list[UpdateView], bool]:
    """Return updates below `after` of the policies that a tenant may read, with its groups and sessions, newest first.

    Returns:
        The updates, of which the first fit into so many bytes, and whether there are more.
    """
    below = sa.true() if after is None else updates.c.update_id < after
    is_shown = named_policies.is_shown_to(tenant, updates.c.policy_id)
    newest = sa.select(updates).where(below, is_shown).order_by(updates.c.update_id.desc())
    page, has_more = pages.read(conn, newest, limit, size=_size(conn.dialect.name), max_bytes=max_bytes)
    records = [rows.UPDATES.record(row) for row in page]
    ids = [record.update_id for record in records]
    in_update, of_update = groups_of(conn, tenant, ids), _sessions(conn, tenant, ids)
    views = [
        UpdateView(
            update=record, groups=tuple(in_update[record.update_id]), sessions=tuple(of_update[record.update_id])
        )
        for record in records
    ]
    return views, has_more


def _size(dialect: str) -> sa.ColumnElement[int]:
    """Return roughly the bytes of an update as JSON, with the groups and sessions of all tenants."""
    num_groups = sa.select(sa.func.count()).where(groups.c.update_id == updates.c.update_id)
    of_sessions = sa.select(
        sa.func.coalesce(sa.func.sum(pages.size_of(dialect, trained_sessions.c.advantages) + _ITEM_BYTES), 0)
    ).where(trained_sessions.c.update_id == updates.c.update_id)
    own = pages.size_of(dialect, updates.c.metrics)
    return own + _ITEM_BYTES * num_groups.scalar_subquery() + of_sessions.scalar_subquery()


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


def _sessions(conn: sa.Connection, tenant: str, update_ids: Sequence[int]) -> Mapping[int, list[TrainedSession]]:
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
