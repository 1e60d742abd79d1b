"""What policies hold and were trained on, in a few numbers: for lists that people read, and for a tenant's quota."""

from __future__ import annotations

import dataclasses
import datetime

import sqlalchemy as sa

from turnwise.store.policies import list_policies
from turnwise.store.rows import from_micros, to_micros
from turnwise.store.tables import DELETED, policies, policy_versions, sessions, updates
from turnwise.types import PolicyStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """What a policy holds."""

    served_version: int | None
    """The version that engines serve; None for the engine's own model, or what the policy was created from."""
    num_versions: int
    """Its published versions, the failed ones and those without files included."""
    num_sessions: int
    num_trained_sessions: int
    """Sessions of its updates; one that was trained twice counts twice."""
    num_trained_tokens: int
    last_update_at: datetime.datetime | None
    num_bytes: int | None = None
    """Size of its versions' files and the trainer's states, as far as they are on this machine; None if unknown."""


def summarise_policies(conn: sa.Connection, tenant: str | None = None) -> dict[int, PolicySummary]:
    """Return what each policy holds, by its number; with a tenant, of the policies and the sessions that it may read.

    It counts the sessions one by one.
    """
    c, own = policy_versions.c, sessions.c
    is_served = c.status == PolicyStatus.ACTIVE.value
    of_versions = sa.select(c.policy_id, sa.func.count(), sa.func.max(sa.case((is_served, c.version))))
    versions = {row[0]: row[1:] for row in conn.execute(of_versions.where(c.version > 0).group_by(c.policy_id))}
    u = updates.c
    sums = sa.select(u.policy_id, sa.func.sum(u.num_sessions), sa.func.sum(u.num_tokens), sa.func.max(u.created_at))
    trained = {row[0]: row[1:] for row in conn.execute(sums.group_by(u.policy_id))}
    counted = sa.select(own.policy_id, sa.func.count()).group_by(own.policy_id)
    counted = counted.where(own.status != DELETED if tenant is None else own.tenant == tenant)
    num_sessions = {row[0]: row[1] for row in conn.execute(counted)}
    found = {}
    for policy in list_policies(conn, tenant):
        num_versions, served = versions.get(policy.policy_id, (0, None))
        num_trained, num_tokens, last = trained.get(policy.policy_id, (0, 0, None))
        found[policy.policy_id] = PolicySummary(
            served_version=served,
            num_versions=num_versions,
            num_sessions=num_sessions.get(policy.policy_id, 0),
            num_trained_sessions=int(num_trained),
            num_trained_tokens=int(num_tokens),
            last_update_at=None if last is None else from_micros(last),
        )
    return found


def trained_tokens_since(conn: sa.Connection, tenant: str, since: datetime.datetime) -> int:
    """Return how many tokens of a tenant's policies updates have trained since an instant."""
    own = sa.select(policies.c.policy_id).where(policies.c.tenant == tenant)
    u = updates.c
    trained = sa.select(sa.func.sum(u.num_tokens)).where(u.policy_id.in_(own), u.created_at >= to_micros(since))
    return int(conn.execute(trained).scalar_one() or 0)
