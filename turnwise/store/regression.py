"""The regression set of the publishing gate: held-out sessions, and sessions that a person or a judge labelled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import sqlalchemy as sa

from turnwise.experience import Experience
from turnwise.store.experiences import experiences_of_sessions
from turnwise.store.labels import labels_of
from turnwise.store.tables import session_labels, sessions
from turnwise.types import DEFAULT_POLICY, Role, SessionKey, SessionStatus, Split

SessionLabels: TypeAlias = Mapping[SessionKey, frozenset[str]]
"""The labels of each session."""


def regression_set(
    conn: sa.Connection,
    num_sessions: int,
    labels: Collection[str],
    *,
    roles: Collection[Role],
    policy_id: int = DEFAULT_POLICY,
) -> tuple[list[Experience], SessionLabels]:
    """Return one experience per chain of the newest held-out sessions with a reward, and of those with a label.

    Args:
        conn: The store.
        num_sessions: Maximum number of held-out sessions, and of sessions of each label.
        labels: The labels; sessions with one of them may be of any split, and need no reward.
        roles: Roles of the turns that count.
        policy_id: The policy whose sessions count.
    """
    is_over = sessions.c.status != SessionStatus.OPEN.value
    held_out = sa.select(sessions.c.session_pk).where(
        sessions.c.split == Split.EVAL.value, is_over, sessions.c.num_rewards > 0, sessions.c.policy_id == policy_id
    )
    pks = set(conn.execute(held_out.order_by(sessions.c.session_pk.desc()).limit(num_sessions)).scalars())
    for label in labels:
        marked = sa.select(session_labels.c.session_pk).where(session_labels.c.label == label)
        pks.update(conn.execute(marked.order_by(session_labels.c.session_pk.desc()).limit(num_sessions)).scalars())
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.tenant, sessions.c.session_id).where(
            sessions.c.session_pk.in_(pks), is_over, sessions.c.policy_id == policy_id
        )
    ).all()
    marks = labels_of(conn, [row.session_pk for row in found])
    named = {
        (row.tenant, row.session_id): frozenset(mark.label for mark in marks.get(row.session_pk, ())) for row in found
    }
    return list(experiences_of_sessions(conn, sorted(row.session_pk for row in found), roles=roles)), named
