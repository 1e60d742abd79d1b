"""Parts of groups: all sessions of a group have one policy of their own, and others may have sampled in them.

Each of these gets a part of the group, in the transaction that makes the group ready. A part is a row of groups, which
is claimed, trained, dropped and made ready again like a group.
"""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store.extensions import Extension, GroupEvent
from turnwise.store.groups import ready
from turnwise.store.schema import HAS_TRAINABLE_OUTCOME, groups, sessions, turns
from turnwise.store.statements import insert_new_rows, is_among, unindexed
from turnwise.types import GroupStatus, SessionStatus

PARTS_AT_ONCE = 500
_OF_A_PART = frozenset(
    {
        *("group_pk", "part_of", "policy_id", "policy_version_first", "num_sessions", "num_finished"),
        *("fencing_token", "trainer_id", "leased_until", "update_id"),
    }
)
"""Columns in which a part differs from its group."""


def note_groups(conn: sa.Connection, event: GroupEvent, group_pks: Collection[int]) -> None:
    """Let the parts of groups follow what has happened to the groups themselves."""
    if event is GroupEvent.CLOSED:
        add_parts(conn, group_pks)
        return
    of_groups = is_among(conn.dialect, groups.c.part_of, group_pks)
    if event is GroupEvent.REVISED:
        # SQLite must search by the keys, not by the status, which most groups have.
        is_trained = unindexed(groups.c.status) == GroupStatus.TRAINED.value
        conn.execute(sa.update(groups).where(of_groups, is_trained).values(**ready("revised")))
    elif event is GroupEvent.OPENED:
        is_open = sa.select(groups.c.group_pk).where(
            groups.c.group_pk.in_(group_pks), groups.c.status == GroupStatus.OPEN.value
        )
        conn.execute(sa.delete(groups).where(groups.c.part_of.in_(is_open), groups.c.status == GroupStatus.READY.value))
    else:
        conn.execute(sa.delete(groups).where(of_groups))


def add_parts(conn: sa.Connection, group_pks: Collection[int]) -> None:
    """Add the parts of groups that are no longer open: one for each other policy with trainable turns in them.

    A part that exists stays as it is.
    """
    found = conn.execute(
        sa.select(
            *(c for c in groups.c if c.name not in _OF_A_PART),
            groups.c.group_pk.label("part_of"),
            turns.c.policy_id,
            sa.func.min(turns.c.policy_version_first).label("policy_version_first"),
            sa.func.count(sa.distinct(turns.c.session_pk)).label("num_sessions"),
        )
        .join_from(groups, sessions, groups.c.group_pk == sessions.c.group_pk)
        .join(turns, turns.c.session_pk == sessions.c.session_pk)
        .where(
            is_among(conn.dialect, sessions.c.group_pk, group_pks),
            is_among(conn.dialect, groups.c.group_pk, group_pks),  # PostgreSQL infers it of single keys alone
            unindexed(groups.c.status) != GroupStatus.OPEN.value,
            sessions.c.status != SessionStatus.OPEN.value,
            sessions.c.num_rewards > 0,
            sessions.c.train == 1,
            turns.c.policy_id != groups.c.policy_id,
            HAS_TRAINABLE_OUTCOME,
        )
        .group_by(groups.c.group_pk, turns.c.policy_id)
    )
    parts = [dict(row._mapping) for row in found]  # noqa: SLF001  SQLAlchemy's public name
    for part in parts:
        part |= {"num_finished": part["num_sessions"], "fencing_token": 0}
        if part["status"] == GroupStatus.CLAIMED:
            part["status"] = GroupStatus.READY.value
    for start in range(0, len(parts), PARTS_AT_ONCE):
        insert_new_rows(conn, groups, parts[start : start + PARTS_AT_ONCE], "group_pk")


EXTENSION = Extension(of_groups=note_groups)
