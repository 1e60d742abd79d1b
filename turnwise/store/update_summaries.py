"""Each update in a few numbers: its metrics, its dropped groups by reason, and its rewards by task and by name.

The trainer's own metrics are of all tenants; groups and rewards are of one tenant.
"""

from __future__ import annotations

import dataclasses
import datetime
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from turnwise import credit
from turnwise.store import lineage, queries, trained
from turnwise.store.engine_activity import Period, idle_shares
from turnwise.store.tables import groups, sessions
from turnwise.types import Credit, GroupStatus, Json, UpdateRecord

MAX_TASKS = 50
"""Tasks of one answer: those with the most sessions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mean:
    """The mean of some sessions' rewards."""

    mean: float
    num_sessions: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSummary:
    """One update."""

    update_id: int
    trainer_id: str
    policy_version: int
    created_at: datetime.datetime
    num_tokens: int
    """Number of sampled tokens that carried loss."""
    metrics: Json
    dropped: Mapping[str, int]
    """Number of this tenant's dropped groups, by reason."""
    reward: Mean | None
    """Of this tenant's sessions in it, those of dropped groups included; None without a rewarded one."""
    by_task: Mapping[str, Mean]
    by_name: Mapping[str, Mean]
    """By the name of the reward; each is a part of the session's reward."""
    engine_idle_share: float | None
    """Share of the engines' serving seconds, since the trainer's update before, in which no call ran; None for the
    first update of the list, and where no proxy has recorded it."""


def summarise_updates(conn: sa.Connection, tenant: str, *, limit: int = 100) -> list[UpdateSummary]:
    """Return the newest updates, oldest first."""
    newest, _ = queries.updates(conn, limit=limit, tenant=tenant)
    judged = {update.update_id: list(_judged_sessions(conn, tenant, update.update_id)) for update in newest}
    sizes = Counter(task_id for of_update in judged.values() for task_id, _ in of_update if task_id)
    tasks = sorted(sizes, key=lambda task: (-sizes[task], task))[:MAX_TASKS]
    in_update = trained.groups_of(conn, tenant, list(judged))
    idle = idle_shares(conn, _periods(newest))
    return [
        UpdateSummary(
            update_id=update.update_id,
            trainer_id=update.trainer_id,
            policy_version=update.policy_version,
            created_at=update.created_at,
            num_tokens=update.num_tokens,
            metrics=update.metrics,
            dropped=dict(
                Counter(
                    group.reason or "no reason"
                    for group in in_update[update.update_id]
                    if group.status is GroupStatus.DROPPED
                )
            ),
            reward=_mean([one.reward for _, one in judged[update.update_id]]),
            by_task=_means((task_id, one.reward) for task_id, one in judged[update.update_id] if task_id in tasks),
            by_name=_means(named for _, one in judged[update.update_id] for named in one.by_name.items()),
            engine_idle_share=idle.get(update.update_id),
        )
        for update in reversed(newest)
    ]


def _periods(newest: Sequence[UpdateRecord]) -> dict[int, Period]:
    """Return the time since the update of the same trainer before it, for each update that follows one."""
    periods: dict[int, Period] = {}
    last: dict[str, datetime.datetime] = {}
    for update in reversed(newest):
        if update.trainer_id in last:
            periods[update.update_id] = last[update.trainer_id], update.created_at
        last[update.trainer_id] = update.created_at
    return periods


def _judged_sessions(
    conn: sa.Connection, tenant: str, update_id: int
) -> Iterable[tuple[str | None, credit.SessionCredit]]:
    """Yield the task and the reward of each rewarded session of an update's groups."""
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.task_id, sessions.c.credit)
        .join_from(groups, sessions, groups.c.group_pk == sessions.c.group_pk)
        .where(groups.c.update_id == update_id, groups.c.tenant == tenant, sessions.c.num_rewards > 0)
    ).all()
    lines = lineage.rewards_of(conn, [row.session_pk for row in found])
    for row in found:
        yield row.task_id, credit.assign_credit([], lines[row.session_pk], Credit(row.credit))


def _mean(values: Sequence[float]) -> Mean | None:
    """Return the mean; None without values."""
    return Mean(statistics.fmean(values), len(values)) if values else None


def _means(named: Iterable[tuple[str, float]]) -> dict[str, Mean]:
    """Return the mean of the values of each name."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in named:
        values[name].append(value)
    return {name: Mean(statistics.fmean(each), len(each)) for name, each in sorted(values.items())}
