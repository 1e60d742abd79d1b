"""Claims of trainers that reach the ledger over HTTP: what they hold, and how their updates are recorded.

They hold the same leases as our own trainer, with the same fencing tokens, of groups of one tenant alone. A repeated
request changes nothing: a claim is known by its holder's name, which contains the key of the request, and an
acknowledgement by the update that its groups already name. An update's number is chosen when it is recorded.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from turnwise.errors import Conflict, InvalidRequest, NotFound
from turnwise.store import claims, rows, trainer_reports, updates, versions
from turnwise.store.claims import Claim, ClaimedGroup
from turnwise.store.database import clock
from turnwise.store.schema import groups, policies, sessions, turns
from turnwise.store.schema import updates as stored_updates
from turnwise.store.statements import is_among, size_of
from turnwise.store.trainer_reports import TrainerState
from turnwise.types import DEFAULT_POLICY, TOKEN_BYTES, GroupStatus, Json, SessionKey, UpdateRecord

MOST_NAMED = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One group as a foreign trainer names it."""

    group: int
    """Its number, as the claim says."""
    group_id: str
    fencing_token: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a foreign trainer did with the groups that it held."""

    trainer_id: str
    policy_version: int
    """The version that the update made, which is published before."""
    trained: Mapping[str, float]
    """The advantage of each turn that was trained, by its id."""
    refused: Mapping[str, str]
    """The reason for each group that was not trained, by its id: these are dropped."""
    metrics: Json


@dataclasses.dataclass(frozen=True, slots=True)
class Renewed:
    """A lease after it was renewed."""

    leased_until: datetime.datetime
    denied: Sequence[str]
    """The sessions of these groups that were marked as not to be trained, also after they were read."""
    deleted: Sequence[str]
    """The groups that were deleted with their sessions: nothing of them may be trained."""


def take(
    conn: sa.Connection,
    tenant: str,
    trainer_id: str,
    request_key: str,
    policy_id: int,
    *,
    max_groups: int,
    singles_per_group: int,
    lease_seconds: float,
) -> Claim | None:
    """Claim groups of a tenant, or return those that an earlier request with this key claimed; None if no group is.

    Raises:
        Conflict: A trainer of ours trains this database.
    """
    for report in trainer_reports.trainer_statuses(conn):
        if report.state in (TrainerState.RUNNING, TrainerState.BLOCKED):
            raise Conflict(
                f"trainer {report.trainer_id!r} trains this database, and one database has one kind of trainer: stop "
                "it, and serve with `turnwise proxy`, before others claim"
            )
    holder = f"{trainer_id} {request_key}"
    c = groups.c
    again = conn.execute(
        sa.select(c.group_pk, c.group_id, c.tenant, c.fencing_token, claims.IS_SINGLE.label("is_single"))
        .where(c.trainer_id == holder, c.tenant == tenant, c.status == GroupStatus.CLAIMED.value)
        .order_by(c.ready_at, c.group_pk)
    ).all()
    if again:
        held = Claim(groups=tuple(ClaimedGroup(**row._mapping) for row in again))  # noqa: SLF001  a public name
        claims.renew(conn, held, lease_seconds)
        return held
    return claims.claim(
        conn,
        holder,
        max_groups=max_groups,
        singles_per_group=singles_per_group,
        lease_seconds=lease_seconds,
        policy_id=policy_id,
        tenant=tenant,
    )


def renew(conn: sa.Connection, tenant: str, held: Sequence[Held], lease_seconds: float) -> Renewed:
    """Extend the leases.

    Raises:
        LeaseLost: Another trainer has claimed one of the groups.
    """
    claim = _claim(tenant, held)
    claims.renew(conn, claim, lease_seconds)
    stored = _stored(conn, claim)
    denied = sa.select(sessions.c.session_id).where(_of_groups(conn.dialect, stored), sessions.c.train == 0)
    return Renewed(
        rows.from_micros(clock(conn) + int(lease_seconds * 1e6)),
        conn.execute(denied.order_by(sessions.c.session_pk)).scalars().all(),
        [each.group_id for each in held if each.group not in stored],
    )


def release(conn: sa.Connection, tenant: str, held: Sequence[Held], reason: str) -> None:
    """Make the groups claimable again.

    Raises:
        LeaseLost: Another trainer has claimed one of the groups.
    """
    claims.release(conn, _claim(tenant, held), reason)


def ack(conn: sa.Connection, tenant: str, held: Sequence[Held], work: Work) -> UpdateRecord:
    """Record an update; return it, also if it was recorded by an earlier request.

    Raises:
        LeaseLost: Another trainer has claimed one of the groups.
        NotFound: There is no such version, or all of the groups were deleted.
        Conflict: The version is of another policy than the groups.
        InvalidRequest: A turn or a group is not of these groups.
    """
    claim = _claim(tenant, held)
    stored = _stored(conn, claim)
    recorded = _recorded(conn, claim, stored)
    if recorded is not None:
        return recorded
    if not stored:
        raise NotFound("all of these groups were deleted with their sessions: nothing is left to record")
    version = versions.get_version(conn, work.policy_version)
    if {row.policy_id for row in stored.values()} != {version.policy_id}:
        raise Conflict(f"policy version {version.version} is of another policy than these groups", param="version")
    names = {each.group_id for each in held}
    strange = sorted(work.refused.keys() - names)
    if strange:
        raise InvalidRequest(f"groups {strange[:MOST_NAMED]} are refused, but not held", param="refused")
    kept = {pk: row for pk, row in stored.items() if row.group_id not in work.refused}
    trained, num_tokens = _trained(conn, tenant, kept, work.trained)
    # Numbers of updates are unique over all policies: transactions choose them one after another.
    conn.execute(sa.select(policies.c.policy_id).where(policies.c.policy_id == DEFAULT_POLICY).with_for_update())
    update = UpdateRecord(
        update_id=updates.last_update_id(conn) + 1,
        policy_id=version.policy_id,
        trainer_id=work.trainer_id,
        policy_version=version.version,
        num_groups=len(kept),
        num_sessions=len(trained),
        num_tokens=num_tokens,
        metrics=work.metrics,
    )
    refused = {(tenant, group_id): reason for group_id, reason in work.refused.items()}
    claims.ack(conn, claims.Finished(claim, update, refused=refused, trained=trained))
    return _update(conn, update.update_id)


def _claim(tenant: str, held: Sequence[Held]) -> Claim:
    return Claim(
        groups=tuple(
            ClaimedGroup(group_pk=each.group, group_id=each.group_id, tenant=tenant, fencing_token=each.fencing_token)
            for each in held
        )
    )


def _stored(conn: sa.Connection, claim: Claim) -> dict[int, rows.StoredRow]:
    """Return those of the groups that are still there, by their numbers, which a database may give again."""
    c = groups.c
    found = conn.execute(
        sa.select(c.group_pk, c.group_id, c.tenant, c.policy_id, c.fencing_token, c.update_id, c.part_of).where(
            is_among(conn.dialect, c.group_pk, claim.group_pks)
        )
    )
    keys = {(group.group_pk, group.tenant, group.group_id) for group in claim.groups}
    return {row.group_pk: row for row in found if (row.group_pk, row.tenant, row.group_id) in keys}


def _recorded(conn: sa.Connection, claim: Claim, stored: Mapping[int, rows.StoredRow]) -> UpdateRecord | None:
    tokens = {group.group_pk: group.fencing_token for group in claim.groups}
    done = {row.update_id for pk, row in stored.items() if row.fencing_token == tokens[pk]}
    (number,) = done if len(done) == 1 else (None,)
    return None if number is None else _update(conn, number)


def _update(conn: sa.Connection, update_id: int) -> UpdateRecord:
    row = conn.execute(sa.select(stored_updates).where(stored_updates.c.update_id == update_id)).one()
    return rows.UPDATES.record(row)


def _of_groups(dialect: sa.Dialect, stored: Mapping[int, rows.StoredRow]) -> sa.ColumnElement[bool]:
    whole = {row.part_of or pk for pk, row in stored.items()}
    return is_among(dialect, sessions.c.group_pk, whole)


def _trained(
    conn: sa.Connection, tenant: str, kept: Mapping[int, rows.StoredRow], advantages: Mapping[str, float]
) -> tuple[dict[SessionKey, dict[str, float]], int]:
    """Return the advantages by session, and the number of the turns' tokens."""
    size = size_of(conn.dialect, turns.c.token_ids) // TOKEN_BYTES
    found = conn.execute(
        sa.select(turns.c.turn_id, sessions.c.session_id, size.label("size"))
        .join_from(turns, sessions, turns.c.session_pk == sessions.c.session_pk)
        .where(_of_groups(conn.dialect, kept), is_among(conn.dialect, turns.c.turn_id, set(advantages)))
    ).all()
    strange = sorted(advantages.keys() - {row.turn_id for row in found})
    if strange:
        raise InvalidRequest(
            f"turns {strange[:MOST_NAMED]} are of no group that was trained: name turns of the claim's chains",
            param="trained",
        )
    trained: dict[SessionKey, dict[str, float]] = {}
    for row in found:
        trained.setdefault((tenant, row.session_id), {})[row.turn_id] = advantages[row.turn_id]
    return trained, sum(row.size for row in found)
