"""Whole sessions, for exports and checks.

Sessions are read in batches in one transaction, so an export of any size uses bounded memory and is a consistent
snapshot.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator

import sqlalchemy as sa

from turnwise.store import lineage, policies, queries
from turnwise.store.session_filter import SessionFilter, rows_in_batches
from turnwise.store.tables import sessions
from turnwise.types import Reward, Session, Turn


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session with all its stored data."""

    session: Session
    policy: str
    """The name of its policy."""
    turns: list[Turn]
    """The stored turns, in order of `seq`."""
    rewards: list[Reward]
    """All reward lines, in order of arrival."""
    updates: lineage.Updates

    def views(self) -> list[lineage.TurnView]:
        """Return the turns with their whole prompts."""
        return lineage.turn_views(self.turns, self.rewards, self.updates)


def count_sessions(conn: sa.Connection, wanted: SessionFilter) -> int:
    """Return the number of sessions that a filter selects."""
    return int(conn.execute(sa.select(sa.func.count()).select_from(sessions).where(*wanted.clauses())).scalar_one())


def session_records(conn: sa.Connection, wanted: SessionFilter) -> Iterator[SessionRecord]:
    """Yield the sessions that a filter selects, oldest first, including sessions without turns.

    Args:
        conn: A transaction that stays open while the iterator is read.
        wanted: Which sessions.
    """
    names = policies.names_of_policies(conn)
    for found in rows_in_batches(conn, *wanted.clauses()):
        turns = lineage.turns_of(conn, [row.session_pk for row in found])
        for row, (session, lines, updates) in zip(found, queries.sessions_with_lines(conn, found), strict=True):
            yield SessionRecord(session, names[row.policy_id], turns.get(row.session_pk, []), lines, updates)


def imported_digests(conn: sa.Connection, tenant: str, session_ids: Collection[str]) -> dict[str, str]:
    """Return the digest of the lines that each of these sessions was imported from; sessions not stored are left out.

    A session that was not imported has an empty digest.
    """
    found = conn.execute(
        sa.select(sessions.c.session_id, sessions.c.metadata).where(
            sessions.c.tenant == tenant, sessions.c.session_id.in_(session_ids)
        )
    )
    return {session_id: json.loads(text).get("imported", {}).get("digest", "") for session_id, text in found}
