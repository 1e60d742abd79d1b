"""Which imported sessions a policy may be trained on beside sampled ones."""

from __future__ import annotations

import sqlalchemy as sa

from turnwise.store.schema import groups
from turnwise.types import DEFAULT_POLICY, GroupStatus


def imported_groups(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> list[int]:
    """Return the keys of a policy's complete groups of imported sessions, oldest first, without dropped groups."""
    unusable = (GroupStatus.OPEN.value, GroupStatus.DROPPED.value)
    wanted = sa.select(groups.c.group_pk).where(
        groups.c.imported == 1, groups.c.policy_id == policy_id, groups.c.status.not_in(unusable)
    )
    return list(conn.execute(wanted.order_by(groups.c.group_pk)).scalars())
