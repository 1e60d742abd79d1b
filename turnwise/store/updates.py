"""Updates: the sessions and turns that each one trained, with their advantages, and summaries for people.

The trainer's own metrics are of all tenants; groups and rewards are of one tenant.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import sqlalchemy as sa

from turnwise import credit
from turnwise.errors import Conflict
from turnwise.store import rows
from turnwise.store.policies import is_shown_to
from turnwise.store.processes import Period, idle_shares
from turnwise.store.rewards import rewards_of
from turnwise.store.schema import groups, sessions, trained_sessions, turns
from turnwise.store.schema import policies as policies_table
from turnwise.store.schema import updates as table
from turnwise.store.statements import PAGE_BYTES, insert_rows, is_among, read_page, size_of
from turnwise.types import (
    DEFAULT_POLICY,
    Credit,
    GroupStatus,
    Json,
    SessionKey,
    TrainedIn,
    UpdateRecord,
)

_ITEM_BYTES = 200
"""Bytes of a group or a session in an update, without advantages, roughly."""
MAX_TASKS = 50
"""Tasks of one answer: those with the most sessions."""
Advantages = Mapping[str, float]
"""The advantage of each trained turn, by turn id."""
Updates: TypeAlias = Sequence[tuple[TrainedIn, Mapping[str, float]]]
"""The updates that trained a session, oldest first, each with the advantages of its turns by turn id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSession:
    """One session of an update."""

    session_id: str
    group_id: str
    advantages: Advantages
    """The advantage of each turn that was trained, by turn id."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """One group of an update."""

    group_id: str
    status: GroupStatus
    """`trained`, or `dropped` if none of its turns was trained."""
    reason: str | None
    """Why it was dropped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateView:
    """An update with one tenant's groups and sessions in it."""

    update: UpdateRecord
    groups: tuple[UpdateGroup, ...]
    sessions: tuple[TrainedSession, ...]


def record_trained(conn: sa.Connection, update: UpdateRecord, trained: Mapping[SessionKey, Advantages]) -> str | None:
    """Store the turns that an update trained, with their advantages; return their digest, None without turns."""
    if not trained:
        return None
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.tenant, sessions.c.session_id).where(
            is_among(conn.dialect, sessions.c.tenant, {tenant for tenant, _ in trained}),
            is_among(conn.dialect, sessions.c.session_id, {session_id for _, session_id in trained}),
        )
    )
    pks = {(row.tenant, row.session_id): row.session_pk for row in found}
    of_turns = _turn_digests(conn, {turn_id for advantages in trained.values() for turn_id in advantages})
    of_sessions = {key: rows.session_digest(advantages, of_turns) for key, advantages in trained.items()}
    insert_rows(
        conn,
        trained_sessions,
        [
            {
                "update_id": update.update_id,
                "session_pk": pks[key],
                "policy_version": update.policy_version,
                "advantages": rows.dump(dict(advantages)),
                "digest": of_sessions[key],
            }
            for key, advantages in trained.items()
            if key in pks  # an imported session, which is not claimed, may have been deleted meanwhile
        ],
    )
    return rows.batch_digest(of_sessions)


def list_updates(
    conn: sa.Connection,
    *,
    limit: int = 100,
    after: int | None = None,
    tenant: str | None = None,
    policy_id: int | None = None,
    max_bytes: int | None = None,
) -> tuple[list[UpdateRecord], bool]:
    """Return updates below `after`, newest first, and whether there are more.

    With a tenant only those of the policies that it may read, with a policy only its own; with `max_bytes` only the
    first that fit into so many bytes with their groups and sessions.
    """
    held = table.c
    found = sa.select(table).order_by(held.update_id.desc())
    if after is not None:
        found = found.where(held.update_id < after)
    if tenant is not None:
        found = found.where(is_shown_to(tenant, held.policy_id))
    if policy_id is not None:
        found = found.where(held.policy_id == policy_id)
    page, has_more = read_page(conn, found, limit, size=_size(conn.dialect), max_bytes=max_bytes)
    return [rows.UPDATES.record(row) for row in page], has_more


def updates_after(conn: sa.Connection, update_id: int, policy_id: int = DEFAULT_POLICY) -> list[UpdateRecord]:
    """Return the updates of a policy above this one, oldest first."""
    u = table.c
    found = sa.select(table).where(u.update_id > update_id, u.policy_id == policy_id)
    return [rows.UPDATES.record(row) for row in conn.execute(found.order_by(table.c.update_id))]


def last_update(conn: sa.Connection, policy_id: int | None = None) -> UpdateRecord | None:
    """Return the newest update, of one policy or of all."""
    newest, _ = list_updates(conn, limit=1, policy_id=policy_id)
    return newest[0] if newest else None


def last_update_id(conn: sa.Connection) -> int:
    """Return the highest id of an update, also of one whose sessions an archive brought from another database."""
    stored, of_sessions = sa.func.max(table.c.update_id), sa.func.max(trained_sessions.c.update_id)
    found = conn.execute(sa.select(sa.select(stored).scalar_subquery(), sa.select(of_sessions).scalar_subquery())).one()
    return max(number or 0 for number in found)


def check_lineage(conn: sa.Connection, versions: Collection[int], policy_id: int = DEFAULT_POLICY) -> None:
    """Check that a policy's newest update made one of these versions: those that a trainer's weights come from.

    Args:
        conn: A transaction of `Database.write`; until it ends no other one checks the same policy.
        versions: The version that the trainer started from, and those that it has made.
        policy_id: The policy.

    Raises:
        Conflict: Another trainer trains the same policy.
    """
    of_policy = policies_table.c.policy_id == policy_id
    conn.execute(sa.select(policies_table.c.policy_id).where(of_policy).with_for_update())
    last = last_update(conn, policy_id)
    if last is not None and last.policy_version not in versions:
        raise Conflict(
            f"trainer {last.trainer_id!r} recorded update {last.update_id} with policy version {last.policy_version}, "
            "which the weights of this trainer do not come from: two trainers train one policy. One trainer at a time "
            "may train the policies of a database: stop this one, or the other one"
        )


def all_updates(conn: sa.Connection) -> list[UpdateRecord]:
    """Return all updates, oldest first."""
    return [rows.UPDATES.record(row) for row in conn.execute(sa.select(table).order_by(table.c.update_id))]


def trained_digests(conn: sa.Connection, update_id: int) -> dict[SessionKey, tuple[bytes | None, bytes | None]]:
    """Return the digests of the sessions of an update that are still stored: as recorded with it, and as they are now.

    The recorded one is None if a turn was deleted before the update was recorded.
    """
    found = conn.execute(
        sa.select(sessions.c.tenant, sessions.c.session_id, trained_sessions.c.advantages, trained_sessions.c.digest)
        .join_from(trained_sessions, sessions)
        .where(trained_sessions.c.update_id == update_id)
    ).all()
    advantages: list[dict[str, float]] = [json.loads(row.advantages) for row in found]
    of_turns = _turn_digests(conn, {turn_id for each in advantages for turn_id in each})
    return {
        (row.tenant, row.session_id): (row.digest, rows.session_digest(each, of_turns))
        for row, each in zip(found, advantages, strict=True)
    }


def _turn_digests(conn: sa.Connection, turn_ids: set[str]) -> dict[str, bytes | None]:
    found = conn.execute(
        sa.select(turns.c.turn_id, turns.c.digest).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    )
    return {row.turn_id: row.digest for row in found}


def trained_in(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, Updates]:
    """Return the updates that trained these sessions, oldest first, with the advantages of their turns."""
    found = conn.execute(
        sa.select(trained_sessions)
        .where(is_among(conn.dialect, trained_sessions.c.session_pk, session_pks))
        .order_by(trained_sessions.c.session_pk, trained_sessions.c.update_id)
    )
    return rows.by_key(
        found,
        "session_pk",
        lambda row: (TrainedIn(update_id=row.update_id, policy_version=row.policy_version), json.loads(row.advantages)),
    )


def last_updates(conn: sa.Connection, tenant: str, session_ids: Sequence[str]) -> dict[str, int]:
    """Return the last update that trained each of these sessions, by session id; untrained sessions are omitted."""
    found = conn.execute(
        sa.select(sessions.c.session_id, sa.func.max(trained_sessions.c.update_id))
        .join_from(sessions, trained_sessions)
        .where(sessions.c.tenant == tenant, is_among(conn.dialect, sessions.c.session_id, set(session_ids)))
        .group_by(sessions.c.session_id)
    )
    return {session_id: update_id for session_id, update_id in found}  # noqa: C416  a Row is a tuple, but not to mypy


def list_update_views(
    conn: sa.Connection, tenant: str, *, limit: int = 100, after: int | None = None, max_bytes: int = PAGE_BYTES
) -> tuple[list[UpdateView], bool]:
    """Return updates below `after` of the policies that a tenant may read, with its groups and sessions, newest first.

    Returns:
        The updates, of which the first fit into so many bytes, and whether there are more.
    """
    records, has_more = list_updates(conn, limit=limit, after=after, tenant=tenant, max_bytes=max_bytes)
    ids = [record.update_id for record in records]
    in_update, of_update = groups_of(conn, tenant, ids), _sessions_in(conn, tenant, ids)
    views = [
        UpdateView(
            update=record, groups=tuple(in_update[record.update_id]), sessions=tuple(of_update[record.update_id])
        )
        for record in records
    ]
    return views, has_more


def _size(dialect: sa.Dialect) -> sa.ColumnElement[int]:
    """Return roughly the bytes of an update as JSON, with the groups and sessions of all tenants."""
    num_groups = sa.select(sa.func.count()).where(groups.c.update_id == table.c.update_id)
    of_sessions = sa.select(
        sa.func.coalesce(sa.func.sum(size_of(dialect, trained_sessions.c.advantages) + _ITEM_BYTES), 0)
    ).where(trained_sessions.c.update_id == table.c.update_id)
    own = size_of(dialect, table.c.metrics)
    return own + _ITEM_BYTES * num_groups.scalar_subquery() + of_sessions.scalar_subquery()


def groups_of(conn: sa.Connection, tenant: str, update_ids: Sequence[int]) -> Mapping[int, list[UpdateGroup]]:
    """Return one tenant's groups in these updates, by update."""
    found = conn.execute(
        sa.select(groups.c.update_id, groups.c.group_id, groups.c.status, groups.c.reason)
        .where(groups.c.update_id.in_(update_ids), groups.c.tenant == tenant)
        .order_by(groups.c.group_pk)
    )
    return rows.by_key(
        found,
        "update_id",
        lambda row: UpdateGroup(group_id=row.group_id, status=GroupStatus(row.status), reason=row.reason),
    )


def _sessions_in(conn: sa.Connection, tenant: str, update_ids: Sequence[int]) -> Mapping[int, list[TrainedSession]]:
    found = conn.execute(
        sa.select(
            trained_sessions.c.update_id, sessions.c.session_id, sessions.c.group_id, trained_sessions.c.advantages
        )
        .join_from(trained_sessions, sessions)
        .where(trained_sessions.c.update_id.in_(update_ids), sessions.c.tenant == tenant)
        .order_by(trained_sessions.c.session_pk)
    )
    return rows.by_key(
        found,
        "update_id",
        lambda row: TrainedSession(
            session_id=row.session_id,
            group_id=row.group_id or row.session_id,
            advantages=json.loads(row.advantages),
        ),
    )


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
    newest, _ = list_updates(conn, limit=limit, tenant=tenant)
    judged = {update.update_id: list(_judged_sessions(conn, tenant, update.update_id)) for update in newest}
    sizes = Counter(task_id for of_update in judged.values() for task_id, _ in of_update if task_id)
    tasks = sorted(sizes, key=lambda task: (-sizes[task], task))[:MAX_TASKS]
    in_update = groups_of(conn, tenant, list(judged))
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
    lines = rewards_of(conn, [row.session_pk for row in found])
    for row in found:
        yield row.task_id, credit.assign_credit([], lines[row.session_pk], Credit(row.credit))


def _mean(values: Sequence[float]) -> Mean | None:
    return Mean(statistics.fmean(values), len(values)) if values else None


def _means(named: Iterable[tuple[str, float]]) -> dict[str, Mean]:
    """Return the mean of the values of each name."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in named:
        values[name].append(value)
    return {name: Mean(statistics.fmean(each), len(each)) for name, each in sorted(values.items())}
