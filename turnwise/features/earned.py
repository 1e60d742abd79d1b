"""What the newest finished sessions of each version earned, and how many of their turns broke."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Collection, Sequence

import sqlalchemy as sa

from turnwise import credit
from turnwise.features.copies import FORKED
from turnwise.features.statistics import intervals
from turnwise.store.rewards import rewards_of
from turnwise.store.rows import StoredRow
from turnwise.store.schema import DELETED, policy_versions, sessions, turns
from turnwise.store.statements import is_among, unindexed
from turnwise.types import DEFAULT_POLICY, IMPORT, Credit, Outcome, Reward, SessionStatus, Split

MAX_COMPARED = 10_000
"""Finished sessions that are read to compare versions, the newest ones."""
MAX_EARNED = 200
"""Sessions that are read to say what a version earned: the newest finished ones before its policy's next version."""
MAX_WINDOWS = 50
"""Versions whose sessions are read so: the newest ones, and version 0, to which one rolls back."""
MOST_SESSIONS = 2**62
FEWEST = 8
Compared = tuple[StoredRow, Sequence[Reward]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """The rewards of the newest finished sessions that sampled with a version last."""

    num_sessions: int
    mean: float
    margin: float | None
    """Half of the mean's 95 % interval, 1.96 standard errors; null for fewer than 8 sessions."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Earned:
        margin = intervals.shown_margin(rewards) if len(rewards) >= FEWEST else None
        return cls(num_sessions=len(rewards), mean=statistics.fmean(rewards), margin=margin)


def earned_by_version(
    conn: sa.Connection, tenant: str | None, policy_ids: Collection[int] = (DEFAULT_POLICY,)
) -> dict[int, Earned]:
    """Return by version what the newest finished sessions of a tenant, or of all, earned with it.

    Each version of the policies has a window of its own, from its publication to that of its policy's next one, so that
    sessions that came later take no place of an earlier version's. A session counts for the version that sampled it.
    Sessions of split `eval` count if they are the hold-out's: others may be sampled otherwise.
    """
    held = sessions.c
    found = [number for window in _windows(conn, policy_ids) for number in _newest(conn, tenant, window)]
    if not found:
        return {}
    is_earned = sa.or_(unindexed(held.split) == Split.TRAIN.value, held.arm.is_not(None))
    rewards: dict[int, list[float]] = collections.defaultdict(list)
    for row, lines in compared(conn, is_among(conn.dialect, held.session_pk, sorted(set(found))), is_earned):
        reward = credit.session_reward(lines, Credit(row.credit))
        if reward is not None:
            rewards[row.version].append(reward)
    return {version: Earned.of(values) for version, values in rewards.items()}


_Window = tuple[int, int, int | None]
"""A policy, and the first and the last instant of a version of it; None for its newest one."""


def _windows(conn: sa.Connection, policy_ids: Collection[int]) -> list[_Window]:
    of = policy_versions.c
    newest = sa.select(of.version).where(of.policy_id.in_(policy_ids)).order_by(of.version.desc()).limit(MAX_WINDOWS)
    first = sa.select(of.version).where(of.policy_id == DEFAULT_POLICY).order_by(of.version).limit(2)
    read = sa.select(of.policy_id, of.created_at).where(of.version.in_(newest) | of.version.in_(first))
    windows: list[_Window] = []
    ends: dict[int, int] = {}
    for policy_id, created_at in conn.execute(read.order_by(of.version.desc())):
        windows.append((policy_id, created_at, ends.get(policy_id)))
        ends[policy_id] = created_at
    return windows


def _newest(conn: sa.Connection, tenant: str | None, window: _Window) -> Sequence[int]:
    """Return the newest finished sessions of a window; the numbers of sessions follow their beginnings."""
    policy_id, begin, end = window
    held = sessions.c

    def first_at(instant: int) -> sa.ScalarSelect[int]:
        found = sa.select(held.session_pk).where(held.created_at >= instant).order_by(held.created_at)
        return found.limit(1).scalar_subquery()

    is_finished = unindexed(held.status).not_in([SessionStatus.OPEN.value, DELETED])
    newest = sa.select(held.session_pk).where(
        is_finished, held.policy_id == policy_id, held.session_pk >= first_at(begin)
    )
    if end is not None:
        newest = newest.where(held.session_pk < sa.func.coalesce(first_at(end), MOST_SESSIONS))
    if tenant is not None:
        newest = newest.where(held.tenant == tenant)
    return conn.scalars(newest.order_by(held.session_pk.desc()).limit(MAX_EARNED)).all()


def compared(conn: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[Compared]:
    """Return the newest finished sessions that fulfil the conditions and sampled something.

    Each has the newest version that it sampled with, and its numbers of turns and of broken ones.
    """
    broken = sa.or_(
        turns.c.outcome.in_([Outcome.ERROR.value, Outcome.UNTRAINABLE.value]), turns.c.finish_reason == "length"
    )
    # Copies were sampled in another session, and turns of other policies by versions that are not compared.
    is_sampled = turns.c.reason.is_distinct_from(FORKED)
    finished = (
        sa.select(*(sessions.c[name] for name in ("session_pk", "credit", "arm", "policy_id")))
        .where(
            *conditions,
            sessions.c.status.not_in([SessionStatus.OPEN.value, DELETED]),
            sessions.c.opened_by.is_distinct_from(IMPORT),  # imported sessions hold copies
            sessions.c.explores.is_(None),  # they sampled in another way, and were drawn at random
        )
        .order_by(sessions.c.created_at.desc())
        .limit(MAX_COMPARED)
        .subquery()
    )
    found = conn.execute(
        sa.select(
            finished,
            sa.func.max(turns.c.policy_version_last).label("version"),
            sa.func.count().label("num_turns"),
            sa.func.sum(sa.case((broken, 1), else_=0)).label("num_broken"),
        )
        .join_from(finished, turns, turns.c.session_pk == finished.c.session_pk)
        .where(is_sampled, turns.c.policy_id == finished.c.policy_id)
        .group_by(*finished.c)
    ).all()
    lines = rewards_of(conn, [row.session_pk for row in found])
    return [(row, lines.get(row.session_pk, [])) for row in found]
