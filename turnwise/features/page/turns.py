"""The rewards and returns of a session's turns, as the page shows them beside each token."""

from __future__ import annotations

import sqlalchemy as sa

from turnwise.credit import SessionCredit
from turnwise.store.experiences import assigned_credit, credited_turns, of_policy
from turnwise.store.rewards import rewards_of
from turnwise.store.schema import sessions
from turnwise.store.turns import turns_of
from turnwise.types import Credit


def session_credit(conn: sa.Connection, session_pk: int, policy_id: int) -> SessionCredit | None:
    """Return the rewards and returns of one policy's turns in a session, under its credit; None without a reward."""
    lines = rewards_of(conn, [session_pk]).get(session_pk)
    if not lines:
        return None
    columns = sessions.c.credit, sessions.c.gamma
    row = conn.execute(sa.select(*columns).where(sessions.c.session_pk == session_pk)).one()
    turns = credited_turns(of_policy(turns_of(conn, [session_pk])[session_pk], policy_id))
    return assigned_credit(turns, lines, Credit(row.credit), gamma=row.gamma)
