"""Which versions still sample: what a trainer that does not run ahead of slow sessions waits for."""

from __future__ import annotations

import datetime

import sqlalchemy as sa

from turnwise.store.rows import to_micros
from turnwise.store.schema import HAS_TRAINABLE_OUTCOME, groups, sessions, turns
from turnwise.store.statements import unindexed
from turnwise.types import DEFAULT_POLICY, GroupStatus, SessionStatus


def oldest_version_in_flight(
    conn: sa.Connection, active_since: datetime.datetime, policy_id: int = DEFAULT_POLICY
) -> int | None:
    """Return the oldest version that sampled a turn to train of an open group of a policy; None without such a turn.

    Sessions without activity since `active_since` are ignored.
    """
    oldest = (
        sa.select(sa.func.min(turns.c.policy_version_first))
        .select_from(groups)
        .join(sessions, sessions.c.group_pk == groups.c.group_pk)
        .join(turns, turns.c.session_pk == sessions.c.session_pk)
        .where(
            # The databases must search from the active sessions on: most open groups may be old.
            unindexed(groups.c.status) == GroupStatus.OPEN.value,
            groups.c.imported.is_(None),
            turns.c.policy_id == policy_id,
            sessions.c.status.in_([status.value for status in SessionStatus]),
            sessions.c.last_active_at >= to_micros(active_since),
            HAS_TRAINABLE_OUTCOME,
        )
    )
    found: int | None = conn.execute(oldest).scalar_one()
    return found
