"""States of the newest sessions, versions and updates: two readings show what has changed between them.

A reading costs the same however long the history is. Changes of sessions that are older than the newest `NUM_SESSIONS`
are not seen.
"""

from __future__ import annotations

import functools

import sqlalchemy as sa

from turnwise.store import policies, tables
from turnwise.types import Json

NUM_SESSIONS = 200
NUM_POLICIES = 20

Key = tuple[str, str | int]
"""Kind of the object, and its id or number."""


State = dict[Key, Json]
"""What one reading found: the fields of each object that may change, oldest first."""


def read_state(conn: sa.Connection, tenant: str) -> State:
    """Return the states of a tenant's newest sessions, and of the newest versions and the last update."""
    s, p, u = tables.sessions.c, tables.policy_versions.c, tables.updates.c
    columns = (s.session_id, s.task_id, s.group_id, s.status, s.num_turns, s.num_chains, s.num_rewards)
    newest = conn.execute(
        sa.select(*columns).where(s.tenant == tenant).order_by(s.session_pk.desc()).limit(NUM_SESSIONS)
    ).all()
    shown = functools.partial(policies.is_shown_to, tenant)
    versions = sa.select(p.version, p.status).where(shown(p.policy_id)).order_by(p.version.desc()).limit(NUM_POLICIES)
    last = sa.select(u.update_id, u.policy_version).where(shown(u.policy_id)).order_by(u.update_id.desc()).limit(1)
    state: State = {}
    for kind, found in (
        ("session", newest),
        ("policy", conn.execute(versions).all()),
        ("update", conn.execute(last).all()),
    ):
        for row in reversed(found):
            state[kind, row[0]] = dict(zip(map(str, row._fields), row, strict=True))
    return state
