"""Session statistics by policy version: a canary is judged by them."""

from __future__ import annotations

import dataclasses
import datetime
import statistics

import sqlalchemy as sa

from turnwise import credit
from turnwise.store import lineage
from turnwise.store.database import to_micros
from turnwise.store.statements import is_among, members
from turnwise.store.tables import DELETED, sessions, turns
from turnwise.types import FORKED, IMPORT, SHADOW, Credit, Json, Outcome, SessionStatus


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """The finished sessions of one version."""

    rewards: tuple[float, ...] = ()
    """Rewards of the sessions that have one."""
    num_sessions: int = 0
    num_turns: int = 0
    num_broken: int = 0
    """Turns that failed, are untrainable, or were cut by length."""

    def summary(self, version: int) -> Json:
        """Return the arm in a few numbers; the mean reward is None without a rewarded session."""
        return {
            "version": version,
            "num_sessions": self.num_sessions,
            "num_turns": self.num_turns,
            "broken_share": self.num_broken / self.num_turns if self.num_turns else 0.0,
            "mean_reward": statistics.fmean(self.rewards) if self.rewards else None,
        }


def arms_since(conn: sa.Connection, since: datetime.datetime, versions: tuple[int, int]) -> tuple[Arm, Arm]:
    """Return statistics of the finished sessions that began since then, for each of two versions.

    A session counts for the newest version that it sampled with.
    """
    broken = sa.or_(
        turns.c.outcome.in_([Outcome.ERROR.value, Outcome.UNTRAINABLE.value]), turns.c.finish_reason == "length"
    )
    is_sampled = turns.c.reason.is_distinct_from(FORKED)  # copies were sampled in another session
    finished = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.credit).where(
            sessions.c.created_at >= to_micros(since),
            sessions.c.status.not_in([SessionStatus.OPEN.value, DELETED]),
            # No agent went on from the replies of shadow samples, and imported sessions hold copies.
            sa.func.coalesce(sessions.c.opened_by, "").not_in([SHADOW, IMPORT]),
        )
    ).all()
    credit_of = {row.session_pk: Credit(row.credit) for row in finished}
    dialect = conn.dialect.name
    found = conn.execute(
        sa.select(
            turns.c.session_pk,
            sa.func.max(turns.c.policy_version_last).label("version"),
            sa.func.count().label("num_turns"),
            sa.func.sum(sa.case((broken, 1), else_=0)).label("num_broken"),
        )
        .where(is_among(dialect, turns.c.session_pk, "session_pks"), is_sampled)
        .group_by(turns.c.session_pk),
        {"session_pks": members(dialect, credit_of)},
    ).all()
    lines = lineage.rewards_of(conn, [row.session_pk for row in found])
    rewards = {
        row.session_pk: credit.session_reward(lines.get(row.session_pk, ()), credit_of[row.session_pk]) for row in found
    }

    def arm(version: int) -> Arm:
        own = [row for row in found if row.version == version]
        return Arm(
            tuple(reward for row in own if (reward := rewards[row.session_pk]) is not None),
            len(own),
            sum(row.num_turns for row in own),
            sum(row.num_broken for row in own),
        )

    return arm(versions[0]), arm(versions[1])
