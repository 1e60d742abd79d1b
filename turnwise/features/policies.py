"""Named policies: each has versions, a pin and a trainer's state of its own, on the base model of the default policy.

Named policies are adapters, so the weights below them must not change: none is created once the default policy has
whole weights of a later version, and none such is published while there are named policies.

The row of a deleted policy keeps only its number, and so do the rows of its versions: engines know adapters by the
numbers of versions, so no number is used again.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import sqlalchemy as sa

from turnwise.errors import Conflict, InvalidRequest, NotFound
from turnwise.store import rows
from turnwise.store.extensions import Extension
from turnwise.store.policies import find_policy, get_policy, is_named, list_policies
from turnwise.store.rows import from_micros, to_micros
from turnwise.store.schema import (
    DELETED,
    NO_TENANT,
    policies,
    policy_versions,
    sessions,
    trainer_states,
    turns,
    updates,
)
from turnwise.store.selection import has_policy
from turnwise.store.serving import serving_state
from turnwise.store.statements import insert_ignoring
from turnwise.store.versions import (
    get_version,
    highest_version,
    known_version,
    list_versions,
    no_version,
    publish_version,
)
from turnwise.types import (
    DEFAULT_POLICY,
    DEFAULT_POLICY_NAME,
    Json,
    Policy,
    PolicyKind,
    PolicyStatus,
    PolicyVersion,
    utc_now,
)
from turnwise.version_directory import on_disk, state_directory

MAX_NAME = 100
MAX_DIGITS = 10
MAX_MEASURED = 1000
"""Newest versions of a policy whose files are measured; the trainer keeps fewer on disk."""


def find_version(conn: sa.Connection, tenant: str, named: str, *, param: str = "policy") -> PolicyVersion:
    """Return a version as people write it: `POLICY@VERSION`, or `POLICY` for its served version.

    Raises:
        NotFound: the tenant has no such policy, or it has no such version, or none that is served.
    """
    policy_name, _, number = named.partition("@")
    policy_id = find_policy(conn, tenant, policy_name).policy_id
    if number:
        version = known_version(conn, int(number)) if number.isdigit() and len(number) < MAX_DIGITS else None
        if version is not None and version.policy_id == policy_id:
            return version
        raise NotFound(f"there is no policy version {named!r}; `turnwise policies` lists them", param=param)
    active = serving_state(conn, policy_id).active
    if active is None or active.version == 0:
        raise NotFound(
            f"policy {policy_name!r} has no served version yet; training makes its first one, and `turnwise policies` "
            "lists the versions of all policies",
            param=param,
        )
    return active


def policy_of_tenant(conn: sa.Connection, tenant: str, version: PolicyVersion) -> Policy:
    """Return the policy of a version, if it is the tenant's own or the default one.

    Raises:
        NotFound: it is another tenant's.
    """
    policy = get_policy(conn, version.policy_id)
    if policy.tenant not in (NO_TENANT, tenant):
        raise no_version(version.version)
    return policy


def create_policy(
    conn: sa.Connection,
    tenant: str,
    name: str,
    base: str = DEFAULT_POLICY_NAME,
    *,
    adapter: str | None = None,
    max_policies: int | None = None,
) -> tuple[Policy, bool]:
    """Create a policy; a repeated creation with the same base or adapter changes nothing. Return whether it is new too.

    `base` is what it starts from as people write it: `POLICY@VERSION`, or `POLICY` for its served adapter, or without
    one for what the policy itself started from. Version 0 is the engine's own model. The adapter in a directory takes
    the place of the base, and becomes the first version. Archived policies do not count for `max_policies`.

    Raises:
        InvalidRequest: the name is not usable, or the base is no adapter.
        NotFound: the tenant has no policy with the name of the base, or it has no such version.
        Conflict: the policy exists with another base, the default policy has whole weights of a later version, or the
            tenant has as many policies as it may.
    """
    _check_name(tenant, name)
    base_version = _base_number(conn, tenant, base) if adapter is None else None
    _check_base_is_frozen(conn)
    # Without the number: the database assigns it, from 1 on.
    row = rows.POLICIES.row(Policy(policy_id=0, tenant=tenant, name=name, base_version=base_version))
    is_new = insert_ignoring(conn, policies, {key: row[key] for key in row if key != "policy_id"})
    policy = find_policy(conn, tenant, name)
    if is_new and max_policies is not None:
        _check_number(conn, tenant, max_policies)
    if is_new and adapter is not None:
        version = publish_next(conn, adapter, PolicyKind.LORA, metrics={}, policy_id=policy.policy_id).version
        conn.execute(sa.update(policies).where(policies.c.policy_id == policy.policy_id).values(base_version=version))
        return get_policy(conn, policy.policy_id), True
    known = None if policy.base_version is None else get_version(conn, policy.base_version)
    is_same = policy.base_version == base_version if adapter is None else known is not None and known.path == adapter
    if not is_same:
        raise Conflict(f"policy {name!r} exists with another base; choose another name", param="name")
    return policy, is_new


def _base_number(conn: sa.Connection, tenant: str, base: str) -> int | None:
    """Return the version of a base as people write it; None where it is the engine's own model."""
    policy_name, _, number = base.partition("@")
    if number:
        version: PolicyVersion | None = find_version(conn, tenant, base, param="base")
    else:
        version = serving_state(conn, find_policy(conn, tenant, policy_name).policy_id).served
    if version is not None and version.kind is PolicyKind.LORA:
        return version.version
    if version is None or version.version == 0:
        return None
    raise InvalidRequest(
        f"version {version.version} is whole weights, and a policy starts from an adapter or from the engine's own "
        f"model; choose an adapter, or `{DEFAULT_POLICY_NAME}@0`",
        param="base",
    )


def _check_number(conn: sa.Connection, tenant: str, max_policies: int) -> None:
    in_use = policies.c.tenant == tenant, policies.c.archived_at.is_(None)
    number = conn.execute(sa.select(sa.func.count()).select_from(policies).where(*in_use)).scalar_one()
    if number > max_policies:
        raise Conflict(
            f"tenant {tenant!r} has {max_policies} policies, which is the limit (tenant_max_policies): archive one "
            "with `turnwise policies archive NAME`, or raise the limit",
            param="name",
            code="too_many_policies",
        )


def _check_name(tenant: str, name: str) -> None:
    if tenant == NO_TENANT:
        raise InvalidRequest("a policy needs a tenant; give one with --tenant", param="tenant")
    is_plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not is_plain or len(name) > MAX_NAME or name == DEFAULT_POLICY_NAME:
        raise InvalidRequest(
            f"a policy cannot be named {name[:MAX_NAME]!r}: use up to {MAX_NAME} letters, digits, `-`, `_` and `.`, "
            f"and not `{DEFAULT_POLICY_NAME}`, which is the policy of all other keys",
            param="name",
        )


def _check_base_is_frozen(conn: sa.Connection) -> None:
    """Check that no engine may have other weights below the adapters than those that it was started with."""
    c = policy_versions.c
    is_trained = c.policy_id == DEFAULT_POLICY, c.kind == PolicyKind.FULL.value, c.version > 0
    usable = sa.select(sa.func.max(c.version)).where(*is_trained, c.status != PolicyStatus.FAILED.value)
    version = conn.execute(usable).scalar_one()
    if version is not None:
        raise Conflict(
            f"the default policy has version {version}, which replaces all weights, and named policies are adapters of "
            "the model that engines were started with; train the default policy with LoRA, in another database",
            code="base_not_frozen",
        )


def archive_policy(
    conn: sa.Connection, tenant: str, name: str, *, is_archived: bool = True, max_policies: int | None = None
) -> Policy:
    """Take a policy out of use, or into use again; return it. Again has no effect.

    Raises:
        InvalidRequest: it is the default policy.
        Conflict: the tenant has as many policies in use as it may.
    """
    policy = find_policy(conn, tenant, name)
    if policy.policy_id == DEFAULT_POLICY:
        raise InvalidRequest("the default policy is the served model and cannot be archived", param="policy")
    if (policy.archived_at is not None) != is_archived:
        change = sa.update(policies).where(policies.c.policy_id == policy.policy_id)
        conn.execute(change.values(archived_at=to_micros(utc_now()) if is_archived else None))
        if not is_archived and max_policies is not None:
            _check_number(conn, tenant, max_policies)
    return get_policy(conn, policy.policy_id)


def bases_since(conn: sa.Connection, versions: Collection[int]) -> list[int]:
    """Return the versions of the default policy since the first of these from which policies were created."""
    if not versions:
        return []
    c = policy_versions.c
    found = sa.select(c.version).join(policies, policies.c.base_version == c.version).distinct().order_by(c.version)
    is_later = c.policy_id == DEFAULT_POLICY, c.version >= min(versions)
    return list(conn.execute(found.where(*is_later)).scalars())


def delete_policies(conn: sa.Connection, tenant: str) -> tuple[int, list[PolicyVersion]]:
    """Delete a tenant's policies with what their versions and updates say; return their number and the versions.

    The versions are as they were: the caller removes the files. A trainer that trains one of these policies ends with
    it when it looks for policies the next time.
    """
    own = list(conn.execute(sa.select(policies.c.policy_id).where(policies.c.tenant == tenant)).scalars())
    if not own:
        return 0, []
    found = conn.execute(sa.select(policy_versions).where(policy_versions.c.policy_id.in_(own)))
    deleted = [rows.VERSIONS.record(row) for row in found]
    nothing = dict.fromkeys(("arms", "weights_digest", "arm_share"))
    was = sa.update(policy_versions).where(policy_versions.c.policy_id.in_(own))
    conn.execute(was.values(path="", status=PolicyStatus.FAILED.value, error="deleted", metrics="{}", **nothing))
    conn.execute(sa.update(updates).where(updates.c.policy_id.in_(own)).values(metrics="{}"))
    conn.execute(sa.delete(trainer_states).where(trainer_states.c.policy_id.in_(own)))
    nothing = dict.fromkeys(("base_version", "pinned_version", "pinned_until"))
    number, now = sa.cast(policies.c.policy_id, sa.Text), to_micros(utc_now())
    gone = sa.update(policies).where(policies.c.policy_id.in_(own))
    conn.execute(gone.values(tenant=NO_TENANT, name=number, archived_at=now, **nothing))
    return len(own), deleted


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicySummary:
    """What a policy holds."""

    served_version: int | None
    """The version that engines serve; None for the engine's own model, or what the policy was created from."""
    num_versions: int
    """Its published versions, the failed ones and those without files included."""
    num_sessions: int
    """Sessions of its own, and those of other policies in which it sampled."""
    num_trained_sessions: int
    """Sessions of its updates; one that was trained twice counts twice."""
    num_trained_tokens: int
    trained_share: float | None
    """Share of the sampled tokens of its last update's batch that carried loss; None if that did not say."""
    last_update_at: datetime.datetime | None
    num_bytes: int | None = None
    """Size of its versions' files and the trainer's states, as far as they are on this machine; None if unknown."""


def summarise_policies(conn: sa.Connection, tenant: str | None = None) -> dict[int, PolicySummary]:
    """Return what each policy holds, by its number; with a tenant, of the policies and the sessions that it may read.

    It counts the sessions and the policies of their turns one by one.
    """
    c, own = policy_versions.c, sessions.c
    is_served = c.status == PolicyStatus.ACTIVE.value
    of_versions = sa.select(c.policy_id, sa.func.count(), sa.func.max(sa.case((is_served, c.version))))
    versions = {row[0]: row[1:] for row in conn.execute(of_versions.where(c.version > 0).group_by(c.policy_id))}
    u = updates.c
    sums = sa.select(u.policy_id, sa.func.sum(u.num_sessions), sa.func.sum(u.num_tokens), sa.func.max(u.created_at))
    trained = {row[0]: row[1:] for row in conn.execute(sums.group_by(u.policy_id))}
    last_ids = sa.select(sa.func.max(u.update_id)).group_by(u.policy_id)
    found_last = conn.execute(sa.select(u.policy_id, u.metrics).where(u.update_id.in_(last_ids)))
    shares = {row.policy_id: json.loads(row.metrics).get("trained_share") for row in found_last}
    is_counted = own.status != DELETED if tenant is None else own.tenant == tenant
    counted = sa.select(own.policy_id, sa.func.count()).group_by(own.policy_id)
    num_sessions = collections.Counter({row[0]: row[1] for row in conn.execute(counted.where(is_counted))})
    others = sa.select(turns.c.policy_id, sa.func.count(sa.distinct(turns.c.session_pk))).join_from(turns, sessions)
    others = others.where(turns.c.policy_id != own.policy_id, is_counted)
    num_sessions.update({row[0]: row[1] for row in conn.execute(others.group_by(turns.c.policy_id))})
    found = {}
    for policy in list_policies(conn, tenant):
        num_versions, served = versions.get(policy.policy_id, (0, None))
        num_trained, num_tokens, last = trained.get(policy.policy_id, (0, 0, None))
        found[policy.policy_id] = PolicySummary(
            served_version=served,
            num_versions=num_versions,
            num_sessions=num_sessions[policy.policy_id],
            num_trained_sessions=int(num_trained),
            num_trained_tokens=int(num_tokens),
            trained_share=shares.get(policy.policy_id),
            last_update_at=None if last is None else from_micros(last),
        )
    return found


def trained_tokens_since(conn: sa.Connection, tenant: str, since: datetime.datetime) -> int:
    own = sa.select(policies.c.policy_id).where(policies.c.tenant == tenant)
    u = updates.c
    trained = sa.select(sa.func.sum(u.num_tokens)).where(u.policy_id.in_(own), u.created_at >= to_micros(since))
    return int(conn.execute(trained).scalar_one() or 0)


def measured_versions(conn: sa.Connection, policy_id: int) -> list[PolicyVersion]:
    return list_versions(conn, limit=MAX_MEASURED, policy_ids=[policy_id])[0]


def publish_next(
    conn: sa.Connection,
    path: str,
    kind: PolicyKind,
    *,
    metrics: Json,
    version: int | None = None,
    policy_id: int = DEFAULT_POLICY,
) -> PolicyVersion:
    """Publish a version of a policy, by default with the number after the highest of all policies, and return it.

    Version 0 is the engine's own model, also where its files are not here: a turn that it sampled names it.

    Raises:
        Conflict: as `publish_version`.
    """
    if version is None:
        highest = highest_version(conn)
        is_first = highest is None and policy_id == DEFAULT_POLICY
        has_sampled = is_first and conn.execute(sa.select(sa.func.min(turns.c.turn_id))).scalar_one() is not None
        version = 0 if is_first and not has_sampled else (highest or 0) + 1
    publish_version(conn, PolicyVersion(version=version, policy_id=policy_id, path=path, kind=kind, metrics=metrics))
    return get_version(conn, version)


def check_publishable(conn: sa.Connection, version: PolicyVersion) -> None:
    """Check that a new version leaves the weights below all adapters as they are."""
    named = sa.select(policies.c.policy_id).where(policies.c.tenant != NO_TENANT)  # the archived ones too
    if version.policy_id != DEFAULT_POLICY:
        if conn.execute(named.where(policies.c.policy_id == version.policy_id)).first() is None:
            raise NotFound(f"there is no policy with the number {version.policy_id!r}", param="policy")
        if version.version == 0:
            raise Conflict("version 0 is the engine's own model; number a policy's versions from 1", param="version")
        if version.kind is PolicyKind.FULL:
            raise Conflict("a version of a named policy is an adapter; publish one with `kind` `lora`", param="kind")
        return
    has_new_weights = version.kind is PolicyKind.FULL and version.version != 0
    if has_new_weights and conn.execute(named.limit(1)).first() is not None:
        raise Conflict(
            f"version {version.version} has whole weights, which would change the model below the adapters of named "
            "policies; publish an adapter (`kind` `lora`), or use another database",
            code="base_not_frozen",
            param="kind",
        )


def _has_policy(name: str, tenant: str | None) -> sa.ColumnElement[bool]:
    return has_policy(lambda policy_id: is_named(policy_id, tenant, name))


EXTENSION = Extension(publishable=check_publishable, conditions={"policy": _has_policy})


def num_bytes_on_disk(found: Iterable[PolicyVersion]) -> int | None:
    """Return the size of the files of some versions, and of the trainer's states beside them; None if it is unknown.

    A state beside a version that was published by hand is not of its policy: the directory may be another policy's.
    As `on_disk`, it reads the file system.
    """
    places = []
    for version in found:
        if version.version > 0 and on_disk(version):
            path = Path(version.path)
            places += [path] if version.update_id is None else [path, state_directory(path.parent, version.version)]
    try:
        return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())
    except OSError:
        return None


def sizes_on_disk(of_policies: Mapping[int, Iterable[PolicyVersion]]) -> dict[int, int | None]:
    """Return `num_bytes_on_disk` of each policy's versions by the policies' numbers."""
    return {number: num_bytes_on_disk(found) for number, found in of_policies.items()}
