"""Evaluations: held-out sessions, the versions that sampled them, and the gauges that are stored with a version.

The version is read from the turns, because engines may serve another version than the one that was to be evaluated. The
regression set of the publishing gate also has the sessions that a person or a judge labelled.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TypeAlias

import sqlalchemy as sa

from turnwise.chains import Experience
from turnwise.store import lineage
from turnwise.store.experiences import experiences_of_sessions
from turnwise.store.tables import policy_versions, session_labels, sessions, turns
from turnwise.types import DEFAULT_POLICY, Role, SessionKey, SessionStatus, Split

SessionLabels: TypeAlias = Mapping[SessionKey, frozenset[str]]
"""The labels of each session."""


def versions_sampled(conn: sa.Connection, keys: Collection[SessionKey]) -> tuple[int | None, int | None]:
    """Return the oldest and the newest version that sampled these eval sessions; None without turns."""
    row = conn.execute(
        sa.select(sa.func.min(turns.c.policy_version_first), sa.func.max(turns.c.policy_version_last))
        .join_from(turns, sessions, turns.c.session_pk == sessions.c.session_pk)
        .where(
            sessions.c.split == Split.EVAL.value,
            sa.tuple_(sessions.c.tenant, sessions.c.session_id).in_(list(keys)),
        )
    ).one()
    return row[0], row[1]


def evaluated_versions(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> dict[int, float]:
    """Return the mean reward of each version of a policy that was evaluated."""
    c = policy_versions.c
    found = conn.execute(sa.select(c.version, c.metrics).where(c.policy_id == policy_id)).all()
    gauges = {row.version: json.loads(row.metrics).get("eval", {}) for row in found}
    return {version: one["reward_mean"] for version, one in gauges.items() if one.get("reward_mean") is not None}


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
    marks = lineage.labels_of(conn, [row.session_pk for row in found])
    named = {
        (row.tenant, row.session_id): frozenset(mark.label for mark in marks.get(row.session_pk, ())) for row in found
    }
    return list(experiences_of_sessions(conn, sorted(row.session_pk for row in found), roles=roles)), named
