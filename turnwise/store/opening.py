"""Create the sessions that calls open, many in one statement.

The database prepares a statement once for each number of rows. So the sessions are inserted in batches of 1, 2, 4, 8,
16 or 32, with three statements for a batch and one more for the call: 31 sessions are five batches, 16 statements.
`ledger.create_session` creates single sessions: those that name a group, and those that a client may have created.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from turnwise.errors import TurnwiseError
from turnwise.store import groups, ledger, rows, trials
from turnwise.store.database import attempt
from turnwise.store.statements import fetch_rows, insert_new_rows
from turnwise.store.tables import sessions
from turnwise.types import Session, SessionKey, Split

Opened = tuple[Session, bool] | TurnwiseError
"""The stored session and whether it was created; or the error that rejects it."""


def open_sessions(conn: sa.Connection, wanted: Sequence[Session]) -> list[Opened]:
    """Create the sessions that are not stored; a rejected session affects no other.

    Args:
        conn: A transaction of `Database.write`.
        wanted: Sessions as they are stored if they are new.

    Returns:
        The result of each session.
    """
    own_groups = {_key(session): session for session in reversed(wanted) if _has_own_group(session)}  # the first counts
    created = _create(conn, own_groups)
    opened: list[Opened] = []
    for session in wanted:
        new = created.pop(_key(session), None)
        if new is not None:
            opened.append((dataclasses.replace(new, last_active_at=new.created_at), True))
        else:
            opened.append(attempt(conn, ledger.create_session, session))
    return opened


def _key(session: Session) -> SessionKey:
    return session.tenant, session.session_id


def _has_own_group(session: Session) -> bool:
    return session.split is Split.TRAIN and session.group_id is None and session.group_size is None


def _create(conn: sa.Connection, wanted: dict[SessionKey, Session]) -> dict[SessionKey, Session]:
    """Insert those of the sessions that are new; return them by their keys.

    The rows are inserted in one order, so that two writers cannot deadlock.
    """
    for key in _stored(conn, wanted):
        wanted.pop(key, None)
    assigned = {_key(session): session for session in trials.assign(conn, [wanted[key] for key in sorted(wanted)])}
    group_pks = groups.create(conn, [session for session in assigned.values() if session.split is Split.TRAIN])
    held_out = [key for key, session in assigned.items() if session.split is Split.EVAL]
    new_rows = [rows.session_row(assigned[key], group_pks.get(key)) for key in sorted([*group_pks, *held_out])]
    created = set(insert_new_rows(conn, sessions, new_rows, ("tenant", "session_id")))
    for key in group_pks.keys() - created:  # another writer has created the session meanwhile
        groups.leave(conn, group_pks[key])
    return {key: session for key, session in assigned.items() if key in created}


def _stored(conn: sa.Connection, keys: Collection[SessionKey]) -> list[SessionKey]:
    """Return the keys of stored sessions among these, and maybe others."""
    if not keys:
        return []
    names = {"tenant": [tenant for tenant, _ in keys], "session_id": [session_id for _, session_id in keys]}
    return [(tenant, session_id) for tenant, session_id in fetch_rows(conn, sessions, tuple(names), names)]
