"""How far the group of a session is, for the note in the answer that ends the session."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from turnwise.store.groups import is_group
from turnwise.store.schema import groups, sessions
from turnwise.types import GroupStatus, Session, SessionStatus


class Progress(NamedTuple):
    """How far the group of a session is."""

    status: GroupStatus
    reason: str | None
    group_size: int | None
    num_sessions: int
    num_finished: int
    num_open: int


def progress_of(conn: sa.Connection, session: Session) -> Progress | None:
    """Return how far the group of a session is; None if it was deleted."""
    group_id = session.session_id if session.group_id is None else session.group_id
    is_open = sessions.c.group_pk == groups.c.group_pk, sessions.c.status == SessionStatus.OPEN.value
    num_open = sa.select(sa.func.count()).select_from(sessions).where(*is_open).correlate(groups).scalar_subquery()
    columns = [groups.c[name] for name in Progress._fields[:-1]]
    row = conn.execute(sa.select(*columns, num_open).where(*is_group(session.tenant, group_id))).one_or_none()
    return None if row is None else Progress._make(row)._replace(status=GroupStatus(row.status))
