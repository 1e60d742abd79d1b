"""The sessions on which a version is judged before it is published: held-out ones, and those with a label."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import sqlalchemy as sa

from turnwise.chains import Experience
from turnwise.store.experiences import MAY_BE_TRAINED, Shape, stream
from turnwise.store.schema import sessions
from turnwise.store.selection import SessionFilter
from turnwise.store.statements import is_among
from turnwise.types import DEFAULT_POLICY, Role, SessionKey, SessionStatus, Split

SessionLabels: TypeAlias = Mapping[SessionKey, frozenset[str]]


def regression_set(
    conn: sa.Connection,
    num_sessions: int,
    labels: Collection[str],
    *,
    roles: Collection[Role],
    policy_id: int = DEFAULT_POLICY,
) -> tuple[list[Experience], SessionLabels]:
    """Return one experience per chain of the newest held-out sessions with a reward, and of those with a label.

    `num_sessions` is the maximum number of held-out sessions, and of sessions of each label. Sessions with one of
    `labels` may be of any split, and need no reward.
    """
    is_over = sessions.c.status != SessionStatus.OPEN.value
    is_held_out = sessions.c.split == Split.EVAL.value, is_over, sessions.c.num_rewards > 0, MAY_BE_TRAINED
    held_out = sa.select(sessions.c.session_pk).where(*is_held_out, sessions.c.policy_id == policy_id)
    pks = set(conn.execute(held_out.order_by(sessions.c.session_pk.desc()).limit(num_sessions)).scalars())
    every = sa.select(sessions.c.session_pk)
    of_label = {label: every.where(*SessionFilter(label=label).clauses()) for label in labels}
    for marked in of_label.values():
        pks.update(conn.execute(marked.order_by(sessions.c.session_pk.desc()).limit(num_sessions)).scalars())
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.tenant, sessions.c.session_id).where(
            sessions.c.session_pk.in_(pks), is_over, sessions.c.policy_id == policy_id, MAY_BE_TRAINED
        )
    ).all()
    own = is_among(conn.dialect, sessions.c.session_pk, sorted(row.session_pk for row in found))
    having = {label: set(conn.execute(marked.where(own)).scalars()) for label, marked in of_label.items()}
    named = {
        (row.tenant, row.session_id): frozenset(label for label, pks in having.items() if row.session_pk in pks)
        for row in found
    }
    shape = Shape(roles=roles, merge="chain", with_unrewarded=True, with_files=True, policy_id=policy_id)
    return list(stream(conn, [own], shape)), named
