"""Policies by their names: the default one is the served model and of no tenant, and a feature makes others.

A policy is known by tenant and name outside of the store, and by `policy_id` inside.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from turnwise.errors import NotFound
from turnwise.store import rows
from turnwise.store.schema import NO_TENANT, policies
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, Policy


def get_policy(conn: sa.Connection, policy_id: int) -> Policy:
    row = conn.execute(sa.select(policies).where(policies.c.policy_id == policy_id)).one_or_none()
    if row is None or (row.tenant == NO_TENANT and policy_id != DEFAULT_POLICY):
        raise NotFound(f"there is no policy with the number {policy_id!r}", param="policy")
    return rows.POLICIES.record(row)


def find_policy(conn: sa.Connection, tenant: str, name: str) -> Policy:
    """Return the tenant's policy of this name, or the default policy by its name.

    Raises:
        NotFound: the tenant has no policy of this name; another tenant may.
    """
    if name == DEFAULT_POLICY_NAME:
        return get_policy(conn, DEFAULT_POLICY)
    own = policies.c.tenant == tenant, policies.c.name == name
    row = conn.execute(sa.select(policies).where(*own)).one_or_none()
    if row is None:
        raise NotFound(f"there is no policy {name!r}; `turnwise policies list` lists them", param="policy")
    return rows.POLICIES.record(row)


def list_policies(conn: sa.Connection, tenant: str | None = None) -> list[Policy]:
    is_there = sa.or_(policies.c.policy_id == DEFAULT_POLICY, policies.c.tenant != NO_TENANT)
    found = sa.select(policies).where(is_there).order_by(policies.c.policy_id)
    if tenant is not None:
        found = found.where(policies.c.tenant.in_([NO_TENANT, tenant]))
    return [rows.POLICIES.record(row) for row in conn.execute(found)]


def names_of_policies(conn: sa.Connection) -> Mapping[int, str]:
    return {policy.policy_id: policy.name for policy in list_policies(conn)}


def is_named(policy_id: sa.Column[int], tenant: str | None, name: str) -> sa.ColumnElement[bool]:
    if name == DEFAULT_POLICY_NAME:
        return policy_id == DEFAULT_POLICY
    found = sa.select(policies.c.policy_id).where(policies.c.name == name)
    return policy_id.in_(found if tenant is None else found.where(policies.c.tenant == tenant))
