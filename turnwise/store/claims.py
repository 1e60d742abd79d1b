"""Which groups a trainer gets, how long it holds them, and the acknowledgement that counts each once.

A claim holds a fencing token per group, which increases by one with every new holder. The transaction that records an
update checks every token, so a trainer with an expired lease cannot record an update, and a group is trained exactly
once, whichever process is killed. A group that was deleted meanwhile is no loss of the lease. Leases use the database's
clock, which only decides when another trainer may claim: if the clock jumps, a group becomes claimable too early, or at
most `LONGEST_LEASE_SECONDS` too late. A trainer names the groups that it holds, so that it never claims them again
itself, however late it renews their lease.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import sqlalchemy as sa

from turnwise.errors import Conflict, LeaseLost
from turnwise.store import rows
from turnwise.store.database import Database, clock
from turnwise.store.groups import drop
from turnwise.store.schema import groups, updates
from turnwise.store.statements import is_among
from turnwise.store.trainer_reports import keep_state
from turnwise.store.updates import Advantages, record_trained
from turnwise.store.versions import publish_version
from turnwise.types import (
    DEFAULT_POLICY,
    GroupKey,
    GroupStatus,
    Json,
    PolicyVersion,
    SessionKey,
    UpdateRecord,
    gauges,
)

Target: TypeAlias = sa.Connection | Database
"""Where a claim is changed: in a transaction, or in one of its own."""
IS_SINGLE = sa.and_(sa.func.coalesce(groups.c.group_size, 0) == 1, groups.c.imported.is_(None))
"""A row of a group that `ClaimedGroup.is_single` describes."""
LONGEST_LEASE_SECONDS = 3600.0
"""Maximum length of a lease. A lease that ends later was granted before the clock was set back; it is ignored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedGroup:
    """One group that a trainer holds."""

    group_pk: int
    group_id: str
    tenant: str
    fencing_token: int
    is_single: bool = False
    """Whether it is a sampled session without a group, or a group of one."""

    @property
    def key(self) -> GroupKey:
        return self.tenant, self.group_id


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Groups that a trainer holds until its lease expires."""

    groups: tuple[ClaimedGroup, ...]
    """At least one group, in the order in which they became ready."""
    num_stale: int = 0

    @property
    def group_pks(self) -> list[int]:
        return [group.group_pk for group in self.groups]

    def size(self, singles_per_group: int, keys: Collection[GroupKey] | None = None) -> int:
        """Return the places of a batch that all of its groups fill, or those with these keys."""
        counted = [group for group in self.groups if keys is None or group.key in keys]
        num_singles = sum(group.is_single for group in counted)
        return len(counted) - num_singles + -(-num_singles // singles_per_group)


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """A claim that was worked on, with all that its acknowledgement records."""

    claim: Claim
    update: UpdateRecord
    policy: PolicyVersion | None = None
    refused: Mapping[GroupKey, str] = dataclasses.field(default_factory=dict)
    """Groups that were not trained, with the reasons: they are dropped."""
    trained: Mapping[SessionKey, Advantages] = dataclasses.field(default_factory=dict)
    state: Json | None = None
    """What the batch left that no checkpoint holds, as `trainer_reports.keep_state` takes it."""


def claim(
    db: Target,
    trainer_id: str,
    *,
    max_groups: int,
    singles_per_group: int = 1,
    lease_seconds: float,
    min_policy_version: int | None = None,
    with_imported: bool = False,
    policy_id: int = DEFAULT_POLICY,
    tenant: str | None = None,
    held: Collection[int] = (),
    now: datetime.datetime | None = None,
) -> Claim | None:
    """Claim the groups of a policy that have been ready longest, or whose lease has expired; None if no group is.

    `singles_per_group` single sessions count as one of the `max_groups`. The lease is at most `LONGEST_LEASE_SECONDS`.
    Groups with a trainable turn older than `min_policy_version` are dropped with the reason `stale`. Groups with the
    keys `held` are the trainer's already, and are not claimed again. With a tenant only its groups are claimed. `now`
    replaces the database's time in tests.
    """
    with _writing(db) as conn:
        instant = clock(conn, now)
        sampled = is_claimable(conn.dialect, instant, policy_id, held)
        num_stale = 0 if min_policy_version is None else _drop_stale(conn, sampled, min_policy_version)
        leased_until = instant + _lease_micros(lease_seconds)
        found = conn.execute(
            sa.select(
                groups.c.group_pk,
                groups.c.group_id,
                groups.c.tenant,
                (groups.c.fencing_token + 1).label("fencing_token"),
                IS_SINGLE.label("is_single"),
            )
            .where(
                is_claimable(conn.dialect, instant, policy_id, held, with_imported=with_imported),
                sa.true() if tenant is None else groups.c.tenant == tenant,
            )
            .order_by(groups.c.ready_at, groups.c.group_pk)
            .limit(max_groups * singles_per_group)
            .with_for_update(skip_locked=True)
        )
        oldest = [ClaimedGroup(**row._mapping) for row in found]  # noqa: SLF001  SQLAlchemy's public name
        places = itertools.accumulate(1 if group.is_single else singles_per_group for group in oldest)
        most = max_groups * singles_per_group
        claimed = tuple(group for group, filled in zip(oldest, places, strict=True) if filled <= most)
        if not claimed:
            return None
        conn.execute(
            sa.update(groups)
            .where(groups.c.group_pk.in_([group.group_pk for group in claimed]))
            .values(
                status=GroupStatus.CLAIMED.value,
                trainer_id=trainer_id,
                fencing_token=groups.c.fencing_token + 1,
                leased_until=leased_until,
            )
        )
    return Claim(groups=claimed, num_stale=num_stale)


def num_claimable(
    conn: sa.Connection,
    *,
    with_imported: bool = False,
    policy_id: int = DEFAULT_POLICY,
    held: Collection[int] = (),
) -> tuple[int, int]:
    """Count a policy's groups and single sessions that could be claimed now, or whose lease has expired.

    `held`, as for `claim`, are not counted.
    """
    claimable = is_claimable(conn.dialect, clock(conn), policy_id, held, with_imported=with_imported)
    singles = sa.func.coalesce(sa.func.sum(sa.case((IS_SINGLE, 1), else_=0)), 0)
    counted = sa.select(sa.func.count(), singles).select_from(groups).where(claimable)
    total, num_singles = conn.execute(counted).one()
    return int(total) - int(num_singles), int(num_singles)


def renew(db: Target, held: Claim, lease_seconds: float, now: datetime.datetime | None = None) -> None:
    """Extend the lease.

    Raises:
        LeaseLost: another trainer has claimed one of the groups.
    """
    with _writing(db) as conn:
        leased_until = clock(conn, now) + _lease_micros(lease_seconds)
        for group in held.groups:
            _change(conn, group, leased_until=leased_until)


def release(db: Target, held: Claim, reason: str | None = None) -> None:
    """Make the groups claimable again, with a reason.

    Raises:
        LeaseLost: another trainer has claimed one of the groups.
    """
    with _writing(db) as conn:
        for group in held.groups:
            _change(conn, group, status=GroupStatus.READY.value, leased_until=None, trainer_id=None, reason=reason)


def take_back(db: Database, trainer_id: str, policy_id: int = DEFAULT_POLICY) -> int:
    """Make the groups of a policy that an earlier process of this trainer held ready again; return their number.

    The same batch can then be trained without a wait for the dead process's lease. If that process still lives, its
    tokens become stale when the groups are claimed again.
    """
    with db.write() as conn:
        held = sa.and_(
            groups.c.trainer_id == trainer_id,
            groups.c.policy_id == policy_id,
            groups.c.status == GroupStatus.CLAIMED.value,
        )
        freed = conn.execute(
            sa.update(groups).where(held).values(status=GroupStatus.READY.value, leased_until=None, trainer_id=None)
        )
    return freed.rowcount


def ack(conn: sa.Connection, done: Finished) -> bool:
    """Record an update with the groups it trained, and publish its policy version, in one transaction.

    Return False, and write nothing, if this trainer has recorded an update with this id before.

    Raises:
        LeaseLost: another trainer has claimed one of the groups.
        Conflict: the update id belongs to another trainer, or the policy version exists with another path.
    """
    update = done.update
    if _is_recorded(conn, update):
        return False
    for group in done.claim.groups:
        reason = done.refused.get(group.key)
        status = GroupStatus.TRAINED if reason is None else GroupStatus.DROPPED
        _change(conn, group, status=status.value, leased_until=None, update_id=update.update_id, reason=reason)
    digest = record_trained(conn, update, done.trained)
    stored = dataclasses.replace(update, batch_digest=digest, metrics=gauges(update.metrics))
    conn.execute(sa.insert(updates).values(**rows.UPDATES.row(stored)))
    keep_state(conn, update.policy_id, done.state or {})
    if done.policy is not None:
        publish_version(conn, done.policy)
    return True


def is_claimable(
    dialect: sa.Dialect, instant: int, policy_id: int, held: Collection[int], *, with_imported: bool = False
) -> sa.ColumnElement[bool]:
    until = groups.c.leased_until
    lapsed = sa.or_(until <= instant, until > instant + _lease_micros(LONGEST_LEASE_SECONDS))
    if held:
        lapsed = sa.and_(lapsed, sa.not_(is_among(dialect, groups.c.group_pk, held)))
    is_ready = sa.or_(
        groups.c.status == GroupStatus.READY.value, sa.and_(groups.c.status == GroupStatus.CLAIMED.value, lapsed)
    )
    claimable = sa.and_(is_ready, groups.c.policy_id == policy_id)
    return claimable if with_imported else sa.and_(claimable, groups.c.imported.is_(None))


def _writing(target: Target) -> contextlib.AbstractContextManager[sa.Connection]:
    return contextlib.nullcontext(target) if isinstance(target, sa.Connection) else target.write()


def _lease_micros(lease_seconds: float) -> int:
    return int(min(lease_seconds, LONGEST_LEASE_SECONDS) * 1e6)


def _drop_stale(conn: sa.Connection, claimable: sa.ColumnElement[bool], min_policy_version: int) -> int:
    wanted = sa.and_(claimable, groups.c.policy_version_first < min_policy_version)
    done = f"dropped %d groups with a turn older than policy version {min_policy_version} (max_staleness)"
    return len(drop(wanted, "stale", done).make(conn))


def _change(conn: sa.Connection, group: ClaimedGroup, **values: Any) -> None:
    """Change a claimed group; nothing where it was deleted with its sessions meanwhile.

    A database may give the number of a deleted group to a new one, whose fencing token starts again.
    """
    c = groups.c
    own = sa.and_(c.group_pk == group.group_pk, c.tenant == group.tenant, c.group_id == group.group_id)
    held = sa.and_(own, c.fencing_token == group.fencing_token, c.status == GroupStatus.CLAIMED.value)
    if conn.execute(sa.update(groups).where(held).values(**values)).rowcount == 1:
        return
    stored = conn.execute(sa.select(c.fencing_token).where(own)).scalar_one_or_none()
    if stored is not None and stored >= group.fencing_token:
        raise LeaseLost(
            f"group {group.group_id!r} is no longer held under fencing token {group.fencing_token}: it was "
            "acknowledged or given back, or another trainer claimed it, also one of this trainer_id; claim again"
        )


def _is_recorded(conn: sa.Connection, update: UpdateRecord) -> bool:
    known = conn.execute(sa.select(updates).where(updates.c.update_id == update.update_id)).one_or_none()
    if known is None:
        return False
    own = update.trainer_id, update.policy_version, update.policy_id
    if (known.trainer_id, known.policy_version, known.policy_id) != own:
        raise Conflict(
            f"update {update.update_id} was recorded by trainer {known.trainer_id!r} as policy version "
            f"{known.policy_version}; two trainers share this database, or a checkpoint is older than it"
        )
    return True
