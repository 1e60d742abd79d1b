"""Which sessions a canary and the hold-out take when they are created, and what sessions of two versions earned.

The transaction that creates a session assigns it to an arm or to none, and stores that with the session. So all
processes agree on it, from the session's first call to its last. A canary takes a share of its policy's sessions. The
hold-out takes a share of those without a group, and makes them `eval` sessions: what an old version samples is not
trained, and nobody waits for it. What the sessions of two versions did is counted here; the proxy compares it.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa

from turnwise import credit
from turnwise.store.rewards import rewards_of
from turnwise.store.rows import StoredRow, to_micros
from turnwise.store.schema import DELETED, policy_versions, sessions, turns
from turnwise.store.statements import execute, is_among, unindexed
from turnwise.types import (
    DEFAULT_POLICY,
    FORKED,
    IMPORT,
    Credit,
    Json,
    Outcome,
    PolicyStatus,
    PolicyVersion,
    Reward,
    Session,
    SessionStatus,
    Split,
)

MAX_COMPARED = 10_000
"""Finished sessions that are read to compare two arms, the newest ones."""
MAX_EARNED = 200
"""Sessions that are read to say what each version earned, the newest ones."""
FEWEST = 8
_RUNNING = (
    "SELECT policy_id, version, arm_share, status FROM policy_versions "  # noqa: S608  constants
    f"WHERE status IN ('{PolicyStatus.CANARY.value}', '{PolicyStatus.HOLDOUT.value}') "
    "AND arm_share IS NOT NULL AND activated_at IS NOT NULL ORDER BY version"
)
_Compared = tuple[StoredRow, Sequence[Reward]]


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """The finished sessions of one version."""

    rewards: tuple[float, ...] = ()
    num_sessions: int = 0
    num_turns: int = 0
    num_broken: int = 0
    """Turns that failed, are untrainable, or were cut by length."""
    by_name: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    @property
    def broken_share(self) -> float:
        return self.num_broken / self.num_turns if self.num_turns else 0.0

    def summary(self, version: int) -> Json:
        return {
            "version": version,
            "num_sessions": self.num_sessions,
            "num_turns": self.num_turns,
            "broken_share": self.broken_share,
            "mean_reward": statistics.fmean(self.rewards) if self.rewards else None,
        }


def takes(version: int, share: float, session: Session) -> bool:
    digest = blake2b(f"{version} {session.tenant} {session.session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def assign(conn: sa.Connection, created: Sequence[Session]) -> list[Session]:
    """Return new sessions as they are stored: those that an arm takes name its version."""
    arms = execute(conn, _RUNNING) if created else []
    return [_assigned(session, arms) for session in created]


def _assigned(session: Session, arms: Sequence[Sequence[Any]]) -> Session:
    if session.opened_by == IMPORT:
        return session
    for policy_id, version, share, status in arms:
        if policy_id != session.policy_id or not takes(version, share, session):
            continue
        if status == PolicyStatus.CANARY.value:
            return dataclasses.replace(session, arm=version, explores=None)
        if session.split is Split.TRAIN and session.group_id is None and session.group_size is None:
            return dataclasses.replace(session, arm=version, split=Split.EVAL, explores=None)
    return session


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """The rewards of the newest finished sessions that sampled with a version last."""

    num_sessions: int
    mean: float
    margin: float | None
    """Half of the mean's 95 % interval, 1.96 standard errors; null for fewer than 8 sessions."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> Earned:
        margin = 1.96 * statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) >= FEWEST else None
        return cls(num_sessions=len(rewards), mean=statistics.fmean(rewards), margin=margin)


def arms_since(
    conn: sa.Connection, since: datetime.datetime, versions: tuple[int, int], policy_id: int = DEFAULT_POLICY
) -> tuple[Arm, Arm]:
    """Return statistics of a policy's finished sessions that began since then, for each of two of its versions.

    A session counts for the newest version that it sampled with.
    """
    found = _compared(conn, sessions.c.created_at >= to_micros(since), sessions.c.policy_id == policy_id)
    newer, older = ([one for one in found if one[0].version == version] for version in versions)
    return _arm_of(newer), _arm_of(older)


def held_out_arms(conn: sa.Connection, holdout: PolicyVersion) -> tuple[Arm, Arm]:
    """Return statistics of the live sessions since a hold-out began: of later versions, and of the hold-out.

    Both are sessions without a group, of the same time, and were assigned at random.
    """
    held_from = 0 if holdout.activated_at is None else to_micros(holdout.activated_at)
    c, is_of_policy = policy_versions.c, sessions.c.policy_id == holdout.policy_id
    is_later = c.policy_id == holdout.policy_id, c.version > holdout.version, c.activated_at > held_from
    began = sa.select(sa.func.min(c.activated_at)).where(*is_later)
    is_live = sa.or_(
        sessions.c.arm == holdout.version, sa.and_(sessions.c.arm.is_(None), sessions.c.split == Split.TRAIN.value)
    )
    since = sessions.c.created_at >= began.scalar_subquery()
    is_over = sessions.c.ended_at.is_not(None)
    found = _compared(conn, sessions.c.group_id.is_(None), is_over, is_live, since, is_of_policy)
    newer = [one for one in found if one[0].arm is None and one[0].version > holdout.version]
    return _arm_of(newer), _arm_of([one for one in found if one[0].arm is not None])


def earned(conn: sa.Connection, tenant: str | None) -> dict[int, Earned]:
    """Return by version what the newest finished sessions of a tenant, or of all, earned with it.

    Sessions of split `eval` count if they are the hold-out's: others may be sampled otherwise.
    """
    held = sessions.c
    last = sa.select(sa.func.max(held.session_pk)).scalar_subquery()
    newest = sa.select(held.session_pk)
    if tenant is None:
        newest = newest.where(held.session_pk > last - MAX_EARNED)
    else:
        newest = newest.where(held.tenant == tenant).order_by(held.session_pk.desc()).limit(MAX_EARNED)
    is_newest = is_among(conn.dialect, held.session_pk, list(conn.scalars(newest)))
    is_earned = sa.or_(unindexed(held.split) == Split.TRAIN.value, held.arm.is_not(None))
    rewards: dict[int, list[float]] = collections.defaultdict(list)
    for row, lines in _compared(conn, is_newest, is_earned):
        reward = credit.session_reward(lines, Credit(row.credit))
        if reward is not None:
            rewards[row.version].append(reward)
    return {version: Earned.of(values) for version, values in rewards.items()}


def _compared(conn: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[_Compared]:
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


def _arm_of(found: Sequence[_Compared]) -> Arm:
    judged = [credit.assign_credit([], lines, Credit(row.credit)) for row, lines in found if lines]
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for one in judged:
        for name, value in one.by_name.items():
            by_name[name].append(value)
    return Arm(
        rewards=tuple(one.reward for one in judged),
        num_sessions=len(found),
        num_turns=sum(row.num_turns for row, _ in found),
        num_broken=sum(row.num_broken for row, _ in found),
        by_name=by_name,
    )
