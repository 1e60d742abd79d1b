"""Which sessions hold copies of turns of others, made of demonstrations or as forks, to treat them alike."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.store.rows import StoredRow
from turnwise.store.schema import index, metadata, of_session, sessions
from turnwise.store.statements import is_among

FORKED = "forked"
"""Reason of an untrainable turn that is a copy of another session's turn."""
SESSIONS_AT_ONCE = 100
session_copies = sa.Table(
    "session_copies",
    metadata,
    of_session(),
    sa.Column("source_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("made_by", sa.Text, nullable=False),
    index("ix_session_copies_source", "tenant", "source_id"),
)
"""The sessions that hold copies of turns of others: `made_by` is `feedback` for those of demonstrations, and `forked`.
The source is named by its id."""


def _copies_of(
    conn: sa.Connection, found: Sequence[StoredRow], *wanted: sa.ColumnElement[bool], with_forks: bool
) -> Sequence[StoredRow]:
    """Return the rows of some sessions that hold copies of turns of these: what demonstrations made, and forks."""
    c, dialect = session_copies.c, conn.dialect
    names = [(row.tenant, row.session_id) for row in found]
    # The databases search by the first two conditions; the last one excludes other sessions of these tenants and ids.
    copies = sa.select(c.session_pk).where(
        is_among(dialect, c.tenant, {tenant for tenant, _ in names}),
        is_among(dialect, c.source_id, {session_id for _, session_id in names}),
        sa.tuple_(c.tenant, c.source_id).in_(names),
    )
    if not with_forks:
        copies = copies.where(c.made_by != FORKED)
    holding = sa.select(sessions).where(sessions.c.session_pk.in_(copies), *wanted)
    return conn.execute(holding.limit(SESSIONS_AT_ONCE).with_for_update()).all()


def deepest_copies(
    conn: sa.Connection, found: Sequence[StoredRow], *wanted: sa.ColumnElement[bool], with_forks: bool
) -> Sequence[StoredRow]:
    """Return copies of which there are no copies; the sessions themselves where they have none."""
    deepest, seen = found, {row.session_pk for row in found}
    while True:
        copies = _copies_of(conn, deepest, *wanted, with_forks=with_forks)
        below = [row for row in copies if row.session_pk not in seen]
        if not below:
            return deepest
        deepest = below
        seen |= {row.session_pk for row in below}
