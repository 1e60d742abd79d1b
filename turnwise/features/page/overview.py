"""Counts, and the states of the newest sessions, versions and updates, for pages and events.

Two readings of the states show what has changed between them. A reading costs the same however long the history is.
Changes of sessions that are older than the newest `NUM_SESSIONS` are not seen.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools

import sqlalchemy as sa

from turnwise.store.claims import IS_SINGLE
from turnwise.store.rows import to_micros
from turnwise.store.schema import NO_TENANT, groups, policy_versions, sessions, turns, updates
from turnwise.store.selection import is_shown_to
from turnwise.store.trainer_reports import TrainerStatus, trainer_statuses
from turnwise.types import GroupStatus, Json, utc_now

RECENTLY = datetime.timedelta(hours=1)
NUM_SESSIONS = 200
NUM_POLICIES = 20
StateKey = tuple[str, str | int]
State = dict[StateKey, Json]
"""The fields of each object that may change, oldest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the rows of the store, or of one tenant."""

    sessions: dict[str, int]
    """By status."""
    groups: dict[str, int]
    """By status: `ready` groups wait for the trainer, `claimed` groups are being trained."""
    num_ready_singles: int
    """Of the `ready` groups those that are a single session; several of them count as a group."""
    num_turns: int
    num_rewards: int
    num_failed_calls: int
    """Calls of the last hour that ended with an error."""
    num_updates: int
    """Updates of the tenant's own policies and of the default one."""
    trainers: list[TrainerStatus]
    """The last reports of the trainers of those policies, newest first."""


def count_rows(conn: sa.Connection, tenant: str | None = None) -> Counts:
    """Count the rows of the store, or of one tenant, with the updates of its policies and of the default one."""
    held, failed = sessions.c, turns.c
    of_tenant = [] if tenant is None else [held.tenant == tenant]
    is_shown = [] if tenant is None else [is_shown_to(tenant, updates.c.policy_id)]
    sums = sa.select(*(sa.func.coalesce(sa.func.sum(column), 0) for column in (held.num_turns, held.num_rewards)))
    num_turns, num_rewards = conn.execute(sums.where(*of_tenant)).one()
    num_failed = sa.select(sa.func.count()).join_from(turns, sessions).where(*of_tenant)
    # The index of failed calls serves only a query with its literal condition.
    is_failed = failed.outcome == sa.literal_column("'error'"), failed.created_at >= to_micros(utc_now() - RECENTLY)
    ready_singles = sa.select(sa.func.count()).where(groups.c.status == GroupStatus.READY.value, IS_SINGLE)
    if tenant is not None:
        ready_singles = ready_singles.where(groups.c.tenant == tenant)
    num_updates = sa.select(sa.func.count()).select_from(updates).where(*is_shown)
    return Counts(
        sessions=_by_status(conn, sessions, tenant),
        groups=_by_status(conn, groups, tenant),
        num_ready_singles=conn.execute(ready_singles).scalar_one(),
        num_turns=int(num_turns),
        num_rewards=int(num_rewards),
        num_failed_calls=conn.execute(num_failed.where(*is_failed)).scalar_one(),
        num_updates=conn.execute(num_updates).scalar_one(),
        trainers=trainer_statuses(conn, tenant),
    )


def _by_status(conn: sa.Connection, table: sa.Table, tenant: str | None) -> dict[str, int]:
    is_counted = table.c.tenant != NO_TENANT if tenant is None else table.c.tenant == tenant
    counted = sa.select(table.c.status, sa.func.count().label("number")).where(is_counted).group_by(table.c.status)
    return {row.status: row.number for row in conn.execute(counted)}


def read_state(conn: sa.Connection, tenant: str) -> State:
    s, p, u = sessions.c, policy_versions.c, updates.c
    columns = (s.session_id, s.task_id, s.group_id, s.status, s.num_turns, s.num_chains, s.num_rewards)
    newest = conn.execute(
        sa.select(*columns).where(s.tenant == tenant).order_by(s.session_pk.desc()).limit(NUM_SESSIONS)
    ).all()
    shown = functools.partial(is_shown_to, tenant)
    versions = sa.select(p.version, p.status).where(shown(p.policy_id)).order_by(p.version.desc()).limit(NUM_POLICIES)
    last = sa.select(u.update_id, u.policy_version).where(shown(u.policy_id)).order_by(u.update_id.desc()).limit(1)
    state: State = {}
    for kind, found in (
        ("session", newest),
        ("policy", conn.execute(versions).all()),
        ("update", conn.execute(last).all()),
    ):
        for row in reversed(found):
            state[kind, row[0]] = dict(zip(map(str, row._fields), row, strict=True))
    return state
