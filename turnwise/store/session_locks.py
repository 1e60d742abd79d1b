"""Locks on sessions that a transaction changes."""

from __future__ import annotations

import functools
from collections.abc import Collection
from itertools import starmap
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.errors import NotFound
from turnwise.store.statements import fetch_at_once, is_among, members
from turnwise.store.tables import sessions
from turnwise.types import SessionKey


class LockedSession(NamedTuple):
    """The columns of a session's row that a writer needs."""

    session_pk: int
    tenant: str
    session_id: str
    status: str
    num_turns: int
    num_rewards: int
    group_pk: int | None


def lock_sessions(conn: sa.Connection, wanted: Collection[SessionKey]) -> list[LockedSession]:
    """Lock these sessions in a fixed order, so that two writers cannot deadlock.

    Raises:
        NotFound: one of them is not stored.
    """
    dialect = conn.dialect.name
    names = {
        "tenants": members(dialect, {tenant for tenant, _ in wanted}),
        "session_ids": members(dialect, {session_id for _, session_id in wanted}),
    }
    found = starmap(LockedSession, fetch_at_once(conn, _select_sessions(dialect), names))
    locked = [row for row in found if (row.tenant, row.session_id) in wanted]
    if len(locked) < len(wanted):
        missing = min(set(wanted) - {(row.tenant, row.session_id) for row in locked})
        raise no_session(missing[1])
    return locked


@functools.cache
def _select_sessions(dialect: str) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(*(sessions.c[field] for field in LockedSession._fields))
        .where(is_among(dialect, sessions.c.tenant, "tenants"), is_among(dialect, sessions.c.session_id, "session_ids"))
        .order_by(sessions.c.session_pk)
        .with_for_update()
    )


def no_session(session_id: str) -> NotFound:
    """Return the error for a session that is not stored."""
    return NotFound(f"there is no session {session_id!r}", param="session_id")
