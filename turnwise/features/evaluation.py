"""Which versions sampled the sessions of an evaluation: engines may serve another one than was to be evaluated."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store.schema import sessions, turns
from turnwise.types import SessionKey, Split


def versions_sampled(conn: sa.Connection, keys: Collection[SessionKey]) -> tuple[int | None, int | None]:
    """Return the oldest and the newest version that sampled these eval sessions; None without turns."""
    row = conn.execute(
        sa.select(sa.func.min(turns.c.policy_version_first), sa.func.max(turns.c.policy_version_last))
        .join_from(turns, sessions, turns.c.session_pk == sessions.c.session_pk)
        .where(
            sessions.c.split == Split.EVAL.value,
            turns.c.policy_id == sessions.c.policy_id,
            sa.tuple_(sessions.c.tenant, sessions.c.session_id).in_(list(keys)),
        )
    ).one()
    return row[0], row[1]
