"""Whole sessions as they are exported: oldest first, each with all of its turns and its reward.

Sessions are read some at a time from one open transaction, so an export of any size takes bounded memory and is a
consistent snapshot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import sqlalchemy as sa

from turnwise import credit
from turnwise.store import lineage, rows
from turnwise.store.experiences import SessionFilter
from turnwise.store.tables import sessions
from turnwise.types import Credit, Reward, Session, Turn

_SESSIONS_AT_ONCE = 32


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session with everything that was stored of it."""

    session: Session
    turns: list[Turn]
    """As they are stored, in order of `seq`."""
    rewards: list[Reward]
    """Every reward line, in order of arrival."""

    def views(self) -> list[lineage.TurnView]:
        """Return the turns with their whole prompts."""
        return lineage.turn_views(self.turns, self.rewards)


def session_records(conn: sa.Connection, wanted: SessionFilter) -> Iterator[SessionRecord]:
    """Yield the sessions that a filter selects, oldest first, those without turns included.

    Args:
        conn: A transaction that stays open while the iterator is read.
        wanted: Which sessions.
    """
    behind = 0
    while True:
        found = conn.execute(
            sa.select(sessions)
            .where(*wanted.clauses(), sessions.c.session_pk > behind)
            .order_by(sessions.c.session_pk)
            .limit(_SESSIONS_AT_ONCE)
        ).all()
        if not found:
            return
        behind = found[-1].session_pk
        pks = [row.session_pk for row in found]
        turns, lines = lineage.turns_of(conn, pks), lineage.rewards_of(conn, pks)
        for row in found:
            judged = lines.get(row.session_pk, [])
            session = rows.session_from_row(row, credit.session_reward(judged, Credit(row.credit)))
            yield SessionRecord(session, turns.get(row.session_pk, []), judged)
