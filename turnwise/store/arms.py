"""Session statistics by policy version: what a canary is judged by, and the lift of one version over another."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import statistics
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from turnwise import credit
from turnwise.store import lineage
from turnwise.store.database import to_micros
from turnwise.store.statements import is_among, members
from turnwise.store.tables import DELETED, sessions, turns
from turnwise.types import FORKED, IMPORT, Credit, Json, Outcome, SessionStatus

ALPHA = 0.05
"""Probability that the interval of a lift ever misses it."""
NARROWEST_AT = 500
"""Sessions of both arms at which the interval is narrowest."""
MIN_REWARDS = 8
"""Rewards that an arm needs for an interval; the standard error of fewer is no measure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """The finished sessions of one version."""

    rewards: tuple[float, ...] = ()
    """Rewards of the sessions that have one."""
    num_sessions: int = 0
    num_turns: int = 0
    num_broken: int = 0
    """Turns that failed, are untrainable, or were cut by length."""
    by_name: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    """Rewards of the sessions that have a reward of this name."""

    def summary(self, version: int) -> Json:
        """Return the arm in a few numbers; the mean reward is None without a rewarded session."""
        return {
            "version": version,
            "num_sessions": self.num_sessions,
            "num_turns": self.num_turns,
            "broken_share": self.num_broken / self.num_turns if self.num_turns else 0.0,
            "mean_reward": statistics.fmean(self.rewards) if self.rewards else None,
        }


def lift(newer: Arm, older: Arm) -> Json:
    """Return the differences of the mean rewards, whole (`reward`) and by name, with intervals for repeated looks.

    Each has `mean`, `low` and `high`; rewards that either arm has fewer than `MIN_REWARDS` of are left out.
    """
    pairs = {name: (values, older.by_name.get(name, ())) for name, values in newer.by_name.items()}
    pairs["reward"] = (newer.rewards, older.rewards)
    return {name: _interval(*each) for name, each in pairs.items() if min(map(len, each)) >= MIN_REWARDS}


def _interval(newer: Sequence[float], older: Sequence[float]) -> Json:
    """Return the difference of two means with the interval that holds at all times with probability 1 − α.

    The asymptotic confidence sequence of Waudby-Smith et al. 2021 (arXiv:2103.06476), theorem 2.2, for the difference
    between two arms to which sessions are assigned at random. With n sessions and the standard error s of the
    difference it is s · √(2 (n ρ² + 1) / (n ρ²) · log(√(n ρ² + 1) / α)) on each side. ρ makes it narrowest at
    `NARROWEST_AT` sessions. So it may be looked at after every session, and the first time that it excludes 0 counts.
    """
    mean = statistics.fmean(newer) - statistics.fmean(older)
    error = math.hypot(*(statistics.stdev(rewards) / math.sqrt(len(rewards)) for rewards in (newer, older)))
    rho_2 = (-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA)) + 1) / NARROWEST_AT
    n_rho_2 = (len(newer) + len(older)) * rho_2
    margin = error * math.sqrt(2 * (n_rho_2 + 1) / n_rho_2 * math.log(math.sqrt(n_rho_2 + 1) / ALPHA))
    return {"mean": mean, "low": mean - margin, "high": mean + margin}


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
            sessions.c.opened_by.is_distinct_from(IMPORT),  # imported sessions hold copies
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
    named = {
        row.session_pk: credit.rewards_by_name(lines.get(row.session_pk, ()), credit_of[row.session_pk])
        for row in found
    }

    def arm(version: int) -> Arm:
        own = [row for row in found if row.version == version]
        return Arm(
            tuple(reward for row in own if (reward := rewards[row.session_pk]) is not None),
            len(own),
            sum(row.num_turns for row in own),
            sum(row.num_broken for row in own),
            _by_name([named[row.session_pk] for row in own]),
        )

    return arm(versions[0]), arm(versions[1])


def _by_name(named: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the rewards of sessions by name; `reward` alone is the whole."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for rewards in named:
        for name, value in rewards.items():
            found[name].append(value)
    return dict(found)
