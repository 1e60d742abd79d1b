"""Locks on sessions that a transaction changes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import starmap
from typing import NamedTuple

import sqlalchemy as sa

from turnwise.errors import NotFound
from turnwise.store.statements import fetch_rows
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
    keys = list(wanted)
    names = {"tenant": [tenant for tenant, _ in keys], "session_id": [session_id for _, session_id in keys]}
    found = starmap(LockedSession, fetch_rows(conn, sessions, LockedSession._fields, names, lock=True))
    locked = [row for row in found if (row.tenant, row.session_id) in wanted]
    if len(locked) < len(wanted):
        missing = min(set(wanted) - {(row.tenant, row.session_id) for row in locked})
        raise no_session(missing[1])
    return locked


def no_session(session_id: str) -> NotFound:
    """Return the error for a session that is not stored."""
    return NotFound(f"there is no session {session_id!r}", param="session_id")
