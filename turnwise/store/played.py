"""Live sessions that are over, with their turns, for the sentinels: the first and newest ones, and the hold-out's.

A live session has no group. Groups are played for training, and whoever starts them sees what becomes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.store import lineage
from turnwise.store.rows import StoredRow
from turnwise.store.tables import sessions
from turnwise.types import DEFAULT_POLICY, FORKED, IMPORT, SessionStatus, Split, Turn

_OVER = (SessionStatus.ENDED.value, SessionStatus.EXPIRED.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A session that is over, with its sampled turns."""

    session_id: str
    status: SessionStatus
    turns: Sequence[Turn]
    """In the order of their commits, without copies."""

    @property
    def version(self) -> int:
        """The newest version that it sampled with."""
        return max(turn.policy_version_last for turn in self.turns)


def live_sessions(
    conn: sa.Connection, num_sessions: int, policy_id: int = DEFAULT_POLICY, *, newest: bool = False
) -> list[Played]:
    """Return a policy's live sessions that ended and that expired: the first or the newest `num_sessions` of each."""
    found: list[StoredRow] = []
    at = sessions.c.last_active_at
    for status in _OVER:
        # The index `ix_sessions_live` has the rows with the first two conditions.
        is_live = (
            sessions.c.group_id.is_(None),
            sessions.c.ended_at.is_not(None),
            sessions.c.split == Split.TRAIN.value,
            sessions.c.policy_id == policy_id,
        )
        over = sa.select(sessions).where(sessions.c.status == status, *is_live).order_by(at.desc() if newest else at)
        found += conn.execute(over.limit(num_sessions)).all()
    return _with_turns(conn, found)


def held_out_sessions(conn: sa.Connection, version: int, num_sessions: int) -> list[Played]:
    """Return the newest sessions that are over and sampled with this version as the hold-out."""
    is_over = sessions.c.status.in_(_OVER)
    found = sa.select(sessions).where(sessions.c.split == Split.EVAL.value, sessions.c.arm == version, is_over)
    return _with_turns(conn, conn.execute(found.order_by(sessions.c.session_pk.desc()).limit(num_sessions)).all())


def _with_turns(conn: sa.Connection, found: Sequence[StoredRow]) -> list[Played]:
    rows = [row for row in found if row.opened_by != IMPORT]
    turns_of = lineage.turns_of(conn, [row.session_pk for row in rows])
    sampled = {pk: [turn for turn in turns if turn.reason != FORKED] for pk, turns in turns_of.items()}
    return [
        Played(session_id=row.session_id, status=SessionStatus(row.status), turns=sampled[row.session_pk])
        for row in rows
        if sampled.get(row.session_pk)
    ]
