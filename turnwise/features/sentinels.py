"""The sessions that sentinels watch: a policy's live ones, and those of a version that is held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.features.copies import FORKED
from turnwise.store.experiences import MAY_BE_TRAINED
from turnwise.store.rows import StoredRow
from turnwise.store.schema import policy_versions, sessions
from turnwise.store.statements import is_among
from turnwise.store.turns import turns_of
from turnwise.types import DEFAULT_POLICY, IMPORT, PolicyVersion, SessionStatus, Split, Turn

_OVER = (SessionStatus.ENDED.value, SessionStatus.EXPIRED.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A session that is over, with the sampled turns of its own policy."""

    session_id: str
    status: SessionStatus
    turns: Sequence[Turn]

    @property
    def version(self) -> int:
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
            MAY_BE_TRAINED,
        )
        over = sa.select(sessions).where(sessions.c.status == status, *is_live).order_by(at.desc() if newest else at)
        found += conn.execute(over.limit(num_sessions)).all()
    return list(_with_turns(conn, found).values())


def played(conn: sa.Connection, pks: Sequence[int]) -> dict[int, Played]:
    """Return sessions with their turns, by `session_pk`; without those that no turn of their policy was sampled in."""
    of_these = sa.select(sessions).where(is_among(conn.dialect, sessions.c.session_pk, pks))
    return _with_turns(conn, conn.execute(of_these).all())


def held_out_sessions(conn: sa.Connection, version: int, num_sessions: int) -> list[Played]:
    """Return the newest sessions that are over and sampled with this version as the hold-out."""
    is_over = sessions.c.status.in_(_OVER)
    is_held_out = sessions.c.split == Split.EVAL.value, sessions.c.arm == version
    found = sa.select(sessions).where(*is_held_out, is_over, MAY_BE_TRAINED)
    newest = conn.execute(found.order_by(sessions.c.session_pk.desc()).limit(num_sessions)).all()
    return list(_with_turns(conn, newest).values())


def alarmed_versions(conn: sa.Connection, active: PolicyVersion | None) -> range:
    """Return the versions above a policy's active one, up to the newest with an alarm.

    An older version is served because of the alarm, and what these versions sampled is not trained.
    """
    if active is None:
        return range(0)
    c = policy_versions.c
    is_newer = c.policy_id == active.policy_id, c.version > active.version
    newest = sa.select(sa.func.max(c.version)).where(*is_newer, c.alarm.is_not(None))
    return range(active.version + 1, (conn.execute(newest).scalar_one() or 0) + 1)


def _with_turns(conn: sa.Connection, found: Sequence[StoredRow]) -> dict[int, Played]:
    rows = [row for row in found if row.opened_by != IMPORT]
    stored = turns_of(conn, [row.session_pk for row in rows])
    sampled = {
        row.session_pk: [
            turn for turn in stored.get(row.session_pk, ()) if turn.reason != FORKED and turn.policy_id == row.policy_id
        ]
        for row in rows
    }
    return {
        row.session_pk: Played(
            session_id=row.session_id, status=SessionStatus(row.status), turns=sampled[row.session_pk]
        )
        for row in rows
        if sampled[row.session_pk]
    }
