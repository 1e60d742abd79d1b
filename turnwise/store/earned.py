"""What the newest finished sessions of each version earned, and how many of their turns broke."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise import credit
from turnwise.store.rewards import rewards_of
from turnwise.store.rows import StoredRow
from turnwise.store.schema import DELETED, sessions, turns
from turnwise.store.statements import is_among, unindexed
from turnwise.types import FORKED, IMPORT, Credit, Outcome, Reward, SessionStatus, Split

MAX_COMPARED = 10_000
"""Finished sessions that are read to compare versions, the newest ones."""
MAX_EARNED = 200
"""Sessions that are read to say what each version earned, the newest ones."""
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
        margin = 1.96 * statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) >= FEWEST else None
        return cls(num_sessions=len(rewards), mean=statistics.fmean(rewards), margin=margin)


def earned_by_version(conn: sa.Connection, tenant: str | None) -> dict[int, Earned]:
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
    for row, lines in compared(conn, is_newest, is_earned):
        reward = credit.session_reward(lines, Credit(row.credit))
        if reward is not None:
            rewards[row.version].append(reward)
    return {version: Earned.of(values) for version, values in rewards.items()}


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
