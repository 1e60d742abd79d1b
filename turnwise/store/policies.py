"""Versions of policies: published by the trainer, activated by the proxy, pinned by a person.

At most one version of a policy is active; it is recorded as active after engines serve it. The version that should be
served (the pinned version, otherwise the newest that has not failed) is computed, not stored. Version numbers are
unique over all policies, and a change of one policy's versions changes nothing of another's.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.errors import Conflict, InvalidRequest, NotFound, SettingsError
from turnwise.store import named_policies, pages, rows
from turnwise.store.database import Database
from turnwise.store.statements import insert_ignoring
from turnwise.store.tables import NO_TENANT, policies
from turnwise.store.tables import policy_versions as table
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
from turnwise.version_directory import on_disk

REFUSED_BY_GATE = "refused by the publishing gate"
ROLLED_BACK = "rolled back as a canary"
LOST = "lost: its trainer ended before its files were written"
UNDONE = "undone: its weights come from a version in whose place an older one was activated"
"""Beginnings of the errors of versions that engines never got, or have loaded."""


MAX_DIGITS = 10
"""Digits that no version's number has."""
MAX_NAMED = 1000
"""Newest versions of a policy among which an error names those with files."""
MAX_MEASURED = 1000
"""Newest versions of a policy whose files are measured; the trainer keeps fewer on disk."""


class ServingState(NamedTuple):
    """The versions that decide what engines serve to the sessions of one policy."""

    active: PolicyVersion | None = None
    """The version that engines serve."""
    canary: PolicyVersion | None = None
    pinned: PolicyVersion | None = None
    newest: PolicyVersion | None = None
    """The newest version that has not failed."""
    holdout: PolicyVersion | None = None
    """The older version that a share of the sessions stays on."""
    base: PolicyVersion | None = None
    """The adapter that a policy without a version samples with; None for the engine's own model."""
    undone: range = range(0)
    """The versions that a person undid, by a choice of the version before them without a pin. They stay undone until
    another version of the policy is chosen, also after a newer one was published."""

    @property
    def pinned_version(self) -> int | None:
        """The version that the policy is pinned to; None if there is no pin."""
        return None if self.pinned is None else self.pinned.version

    @property
    def target(self) -> PolicyVersion | None:
        """The version to serve: the pinned one, or the newest that has not failed."""
        wanted = self.pinned or self.newest
        if wanted is not None and wanted.status is PolicyStatus.FAILED:
            return self.active or self.newest
        return wanted

    def of_arm(self, arm: int | None) -> PolicyVersion | None:
        """Return the version that a session of this arm samples with; None if it is in no arm, or its arm has ended."""
        arms = (each for each in (self.canary, self.holdout) if each is not None)
        return next((each for each in arms if each.version == arm), None)


NO_VERSIONS = ServingState()


def publish_policy(conn: sa.Connection, policy: PolicyVersion) -> bool:
    """Publish a version; return whether it is new. Publishing the same version and path again changes nothing.

    A version that is published before its files are written is published again after that, with their digest.
    A version with an error was refused by its publisher: it is stored as failed, and never served unless a person
    chooses it.

    Raises:
        NotFound: the version's policy does not exist.
        Conflict: the version exists with another path or of another policy, or it has whole weights beside named
            policies.
    """
    status = PolicyStatus.PUBLISHED if policy.error is None else PolicyStatus.FAILED
    row = conn.execute(sa.select(table).where(table.c.version == policy.version)).one_or_none()
    if row is None:
        named_policies.check_publishable(conn, policy)
        if insert_ignoring(conn, table, rows.POLICIES.row(policy, status=status.value)):
            return True
    known = get_policy(conn, policy.version)
    if known.policy_id != policy.policy_id:
        raise Conflict(f"version {policy.version} is of another policy; publish the next number", param="version")
    if known.path != policy.path:
        raise Conflict(
            f"policy version {policy.version} is published from {known.path!r}, not {policy.path!r}; versions never "
            "change, publish the next one",
            param="version",
        )
    if policy.is_written and not known.is_written:
        _set(conn, policy.version, weights_digest=policy.weights_digest)
    return False


def fail_unwritten(conn: sa.Connection, after: int, policy_id: int = DEFAULT_POLICY) -> list[int]:
    """Fail a policy's versions above this one that a trainer published and never wrote; return them.

    Their turns keep their behaviour logprobs, and their numbers are not used again.
    """
    is_lost = sa.and_(
        table.c.policy_id == policy_id,
        table.c.version > after,
        table.c.update_id.is_not(None),
        table.c.weights_digest.is_(None),
        table.c.status != PolicyStatus.FAILED.value,
    )
    failed = sa.update(table).where(is_lost).values(status=PolicyStatus.FAILED.value, error=LOST)
    return list(conn.execute(failed.returning(table.c.version)).scalars())


def adopt_base(conn: sa.Connection, base: PolicyVersion) -> None:
    """Publish version 0 in an empty ledger; check that a ledger with versions belongs to this model.

    Raises:
        SettingsError: it belongs to another one, whose token ids and weights mean nothing to this one.
    """
    row = conn.execute(sa.select(table).where(table.c.version == base.version)).one_or_none()
    if row is None:
        if serving_state(conn).newest is None:
            publish_policy(conn, base)
        return
    known = rows.POLICIES.record(row)
    if known.model_digest is None and known.path == base.path:
        _set(conn, base.version, model_digest=base.model_digest)
    elif None not in (known.model_digest, base.model_digest) and known.model_digest != base.model_digest:
        raise SettingsError(
            f"the database belongs to the model {known.path!r}, and {base.path!r} has another tokenizer or other "
            "weights: its sessions and versions cannot be served or trained with this model. Give the new model "
            "another database and another directory of versions (`turnwise up --database URL --runs-dir DIR`), or "
            "restore the model"
        )


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

    Raises:
        Conflict: as `publish_policy`.
    """
    if version is None:
        newest = conn.execute(sa.select(sa.func.max(table.c.version))).scalar_one()
        is_first = newest is None and policy_id == DEFAULT_POLICY
        version = 0 if is_first else (newest or 0) + 1  # 0 is the engine's own model
    publish_policy(conn, PolicyVersion(version=version, policy_id=policy_id, path=path, kind=kind, metrics=metrics))
    return get_policy(conn, version)


def create_policy(
    conn: sa.Connection,
    tenant: str,
    name: str,
    base: str = DEFAULT_POLICY_NAME,
    *,
    adapter: str | None = None,
    max_policies: int | None = None,
) -> tuple[Policy, bool]:
    """Create a policy; a repeated creation with the same base or adapter changes nothing.

    Args:
        conn: A transaction of `Database.write`.
        tenant: Its owner.
        name: Its name, unique within the tenant.
        base: What it starts from as people write it: `POLICY@VERSION`, or `POLICY` for its served adapter, or without
            one for what the policy itself started from. Version 0 is the engine's own model.
        adapter: The directory of an adapter that it starts from instead, and that becomes its first version.
        max_policies: How many policies the tenant may have, without archived ones; None for any number.

    Returns:
        The policy, and whether this call created it.

    Raises:
        InvalidRequest: the name is not usable, or the base is no adapter.
        NotFound: the tenant has no policy with the name of the base, or it has no such version.
        Conflict: the policy exists with another base, the default policy has whole weights of a later version, or the
            tenant has as many policies as it may.
    """
    named_policies.check_name(tenant, name)
    base_version = _base_number(conn, tenant, base) if adapter is None else None
    named_policies.check_base_is_frozen(conn)
    # Without the number: the database assigns it, from 1 on.
    row = rows.NAMED_POLICIES.row(Policy(policy_id=0, tenant=tenant, name=name, base_version=base_version))
    is_new = insert_ignoring(conn, policies, {key: row[key] for key in row if key != "policy_id"})
    policy = named_policies.policy_named(conn, tenant, name)
    if is_new and max_policies is not None:
        named_policies.check_number(conn, tenant, max_policies)
    if is_new and adapter is not None:
        version = publish_next(conn, adapter, PolicyKind.LORA, metrics={}, policy_id=policy.policy_id).version
        conn.execute(sa.update(policies).where(policies.c.policy_id == policy.policy_id).values(base_version=version))
        return named_policies.named_policy(conn, policy.policy_id), True
    known = None if policy.base_version is None else get_policy(conn, policy.base_version)
    is_same = policy.base_version == base_version if adapter is None else known is not None and known.path == adapter
    if not is_same:
        raise Conflict(f"policy {name!r} exists with another base; choose another name", param="name")
    return policy, is_new


def _base_number(conn: sa.Connection, tenant: str, base: str) -> int | None:
    """Return the version of a base as people write it; None where it is the engine's own model.

    Raises:
        NotFound: the tenant has no such policy, or it has no such version.
        InvalidRequest: its weights are not an adapter.
    """
    policy_name, _, number = base.partition("@")
    if number:
        version: PolicyVersion | None = find_version(conn, tenant, base, param="base")
    else:
        state = serving_state(conn, named_policies.policy_named(conn, tenant, policy_name).policy_id)
        version = state.active or state.base
    if version is not None and version.kind is PolicyKind.LORA:
        return version.version
    if version is None or version.version == 0:
        return None
    raise InvalidRequest(
        f"version {version.version} is whole weights, and a policy starts from an adapter or from the engine's own "
        f"model; choose an adapter, or `{DEFAULT_POLICY_NAME}@0`",
        param="base",
    )


def find_version(conn: sa.Connection, tenant: str, named: str, *, param: str = "policy") -> PolicyVersion:
    """Return a version as people write it: `POLICY@VERSION`, or `POLICY` for its served version.

    Raises:
        NotFound: the tenant has no such policy, or it has no such version, or none that is served.
    """
    policy_name, _, number = named.partition("@")
    policy_id = named_policies.policy_named(conn, tenant, policy_name).policy_id
    if number:
        with contextlib.suppress(NotFound):
            version = get_policy(conn, int(number) if number.isdigit() and len(number) < MAX_DIGITS else -1)
            if version.policy_id == policy_id:
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
    policy = named_policies.named_policy(conn, version.policy_id)
    if policy.tenant not in (NO_TENANT, tenant):
        raise _no_version(version.version)
    return policy


def activate_policy(
    conn: sa.Connection,
    version: int,
    reload_seconds: float | None = None,
    holdout_share: float = 0.0,
) -> PolicyVersion:
    """Record that engines serve this version now, and retire its policy's previous one, or make it the hold-out.

    A hold-out stays until a version is served that is not newer.

    Args:
        conn: A transaction of `Database.write`.
        version: The version.
        reload_seconds: How long engines were paused.
        holdout_share: Share of new sessions that stays on the previous version if there is no hold-out; 0 for none.

    A version that failed while engines loaded it stays failed.

    Raises:
        NotFound: no such version.
    """
    policy_id = get_policy(conn, version).policy_id
    state = serving_state(conn, policy_id)
    previous, holdout = state.active, state.holdout
    if holdout is not None and holdout.version >= version:
        end_holdout(conn, holdout.version)
        holdout = None
    if previous is not None and previous.version != version:
        if holdout_share > 0 and holdout is None and previous.version < version:
            _set(conn, previous.version, status=PolicyStatus.HOLDOUT, arm_share=holdout_share)
        else:
            _set(conn, previous.version, status=PolicyStatus.RETIRED)
    is_good = table.c.status != PolicyStatus.FAILED.value
    served = {"status": PolicyStatus.ACTIVE, "reload_seconds": reload_seconds, "activated_at": utc_now()}
    return _set(conn, version, is_good, error=None, **served)


def fail_policy(conn: sa.Connection, version: int, error: str, evidence: Json | None = None) -> PolicyVersion:
    """Record that engines could not load this version, with the error; the evidence is added to its metrics.

    Raises:
        NotFound: no such version.
    """
    add_metrics(conn, version, evidence or {})
    return _set(conn, version, status=PolicyStatus.FAILED, error=error)


def add_metrics(conn: sa.Connection, version: int, metrics: Json) -> None:
    """Add metrics to those of a version, in place of those of the same names.

    Raises:
        NotFound: no such version.
    """
    _set(conn, version, metrics=get_policy(conn, version).metrics | metrics)


def try_policy(conn: sa.Connection, version: int, share: float | None) -> PolicyVersion:
    """Record that this share of the sessions that are created from now on samples with this version as a canary.

    Without a share engines may load it, and no session samples with it yet.

    Raises:
        NotFound: no such version.
    """
    began_at = None if share is None else utc_now()
    return _set(
        conn, version, status=PolicyStatus.CANARY, error=None, arms=None, activated_at=began_at, arm_share=share
    )


def record_arms(conn: sa.Connection, version: int, arms: Json) -> None:
    """Store the compared sessions of a version's canary in place of those of the last comparison."""
    _set(conn, version, arms=arms)


def reconsider_policy(conn: sa.Connection, version: int) -> PolicyVersion:
    """Allow a failed version, or one whose canary was cancelled, to be loaded again; other versions do not change.

    Raises:
        NotFound: no such version.
    """
    again = table.c.status.in_([PolicyStatus.FAILED.value, PolicyStatus.CANARY.value])
    return _set(conn, version, again, status=PolicyStatus.PUBLISHED, error=None, activated_at=None)


def pin_policy(
    conn: sa.Connection, version: int | None, *, until: int | None = None, policy_id: int = DEFAULT_POLICY
) -> None:
    """Pin a policy to this version, so that its later ones are not served; None follows the newest version again.

    Args:
        conn: A transaction of `Database.write`.
        version: The version to serve.
        until: The pin ends when a version above this one is published; None keeps the pin.
        policy_id: The policy.

    Raises:
        NotFound: it has no such version.
    """
    if version is not None and get_policy(conn, version).policy_id != policy_id:
        raise _no_version(version)
    pinned = sa.update(policies).where(policies.c.policy_id == policy_id)
    conn.execute(pinned.values(pinned_version=version, pinned_until=until))


def choose_policy(conn: sa.Connection, version: int, *, pin: bool) -> PolicyVersion:
    """Serve a version to its policy's sessions, and load it again if it failed; return it.

    Without a pin it is served until a version above the newest is published, and the versions above it are undone:
    training goes on from it.

    Raises:
        NotFound: no such version.
    """
    chosen = reconsider_policy(conn, version)
    policy_id = chosen.policy_id
    newest = serving_state(conn, policy_id).newest
    if pin:
        pin_policy(conn, version, policy_id=policy_id)
    elif newest is None or newest.version == version:
        pin_policy(conn, None, policy_id=policy_id)
    else:
        highest = conn.execute(sa.select(sa.func.max(table.c.version))).scalar_one()
        pin_policy(conn, version, until=highest, policy_id=policy_id)
    return chosen


def check_files_exist(db: Database, policy: PolicyVersion) -> None:
    """Check that the files of a version exist, before it is chosen; as `on_disk`, it reads the file system.

    Raises:
        Conflict: they no longer exist; the message names the policy's versions that can be chosen.
    """
    if policy.status is PolicyStatus.ACTIVE or on_disk(policy) is not False:
        return
    with db.read() as conn:
        newest, _ = list_policies(conn, limit=MAX_NAMED, policy_ids=[policy.policy_id])
    able = ", ".join(str(each.version) for each in reversed(newest) if on_disk(each) is not False)
    raise Conflict(
        f"Version {policy.version}'s files no longer exist ({policy.path!r}): the trainer keeps as many versions as "
        f"`keep_versions` says. Choose one of: {able or 'none'}.",
        param="version",
        code="version_pruned",
    )


def _set(conn: sa.Connection, version: int, *conditions: sa.ColumnElement[bool], **fields: Any) -> PolicyVersion:
    """Set fields of a version if it fulfils the conditions; return it.

    Raises:
        NotFound: no such version.
    """
    change = sa.update(table).where(table.c.version == version, *conditions)
    conn.execute(change.values(**rows.POLICIES.values(fields)))
    return get_policy(conn, version)


def get_policy(conn: sa.Connection, version: int) -> PolicyVersion:
    """Return a version.

    Raises:
        NotFound: no such version.
    """
    row = conn.execute(sa.select(table).where(table.c.version == version)).one_or_none()
    if row is None:
        raise _no_version(version)
    return rows.POLICIES.record(row)


def _no_version(version: int) -> NotFound:
    return NotFound(f"there is no policy version {version!r}; `turnwise policies` lists them", param="version")


def list_policies(
    conn: sa.Connection,
    *,
    limit: int = 100,
    after: int | None = None,
    max_bytes: int | None = None,
    policy_ids: Collection[int] | None = None,
) -> tuple[list[PolicyVersion], bool]:
    """Return versions below `after`, newest first, and whether there are more.

    With `max_bytes` only the first that fit into so many bytes; with `policy_ids` only those of these policies.
    """
    wanted = sa.true() if after is None else table.c.version < after
    if policy_ids is not None:
        wanted = sa.and_(wanted, table.c.policy_id.in_(policy_ids))
    newest = sa.select(table).where(wanted).order_by(table.c.version.desc())
    size = pages.size_of(conn.dialect.name, table.c.metrics, table.c.error, table.c.arms)
    found, has_more = pages.read(conn, newest, limit, size=size, max_bytes=max_bytes)
    return [rows.POLICIES.record(row) for row in found], has_more


def end_holdout(conn: sa.Connection, version: int) -> None:
    """Let new sessions sample with the served version instead of this hold-out; other versions do not change."""
    _set(conn, version, table.c.status == PolicyStatus.HOLDOUT.value, status=PolicyStatus.RETIRED)


def failed_versions(conn: sa.Connection, versions: Collection[int]) -> frozenset[int]:
    """Return the failed ones among these versions."""
    failed = sa.and_(table.c.status == PolicyStatus.FAILED.value, table.c.version.in_(versions))
    return frozenset(conn.execute(sa.select(table.c.version).where(failed)).scalars())


def refused_in_a_row(conn: sa.Connection, count: int, policy_id: int = DEFAULT_POLICY) -> list[PolicyVersion]:
    """Return so many of a policy's newest versions, newest first, if engines refused each of them; else none."""
    found, _ = list_policies(conn, limit=count, policy_ids=[policy_id])
    not_by_engines = REFUSED_BY_GATE, ROLLED_BACK, LOST, UNDONE
    is_refused = [
        each.status is PolicyStatus.FAILED and not (each.error or "").startswith(not_by_engines) for each in found
    ]
    return found if len(found) == count and all(is_refused) else []


def note_alarm(conn: sa.Connection, version: int, alarm: str | None) -> None:
    """Store which sentinel of this version is beyond its bound; None after the bound was changed."""
    _set(conn, version, alarm=alarm)


def alarmed_versions(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> range:
    """Return the versions above the served one, up to the newest that has an alarm: the older one answers it."""
    active = serving_state(conn, policy_id).active
    if active is None:
        return range(0)
    is_newer = table.c.policy_id == policy_id, table.c.version > active.version
    newest = sa.select(sa.func.max(table.c.version)).where(*is_newer, table.c.alarm.is_not(None))
    return range(active.version + 1, (conn.execute(newest).scalar_one() or 0) + 1)


def serving_state(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> ServingState:
    """Return the state of one policy, also of an archived one."""
    return _states(conn, policies.c.policy_id == policy_id).get(policy_id, NO_VERSIONS)


def serving_states(conn: sa.Connection) -> dict[int, ServingState]:
    """Return the state of each policy that has a version, a pin or a base and is in use, by number."""
    return _states(conn, policies.c.archived_at.is_(None))


def _states(conn: sa.Connection, wanted: sa.ColumnElement[bool]) -> dict[int, ServingState]:
    of_policy: dict[int, list[rows.StoredRow]] = {}
    for row in conn.execute(_select_versions_of_states().where(wanted)):
        of_policy.setdefault(row.of_policy, []).append(row)
    return {policy_id: _state(policy_id, of_policy[policy_id]) for policy_id in sorted(of_policy)}


@functools.cache
def _select_versions_of_states() -> sa.Select[*tuple[Any, ...]]:
    """Select all versions of each policy's `ServingState`, with the policy and its pin."""
    newer = table.alias("newer")
    newest = sa.select(sa.func.max(newer.c.version)).where(
        newer.c.policy_id == policies.c.policy_id, newer.c.status != PolicyStatus.FAILED.value
    )
    in_use = (PolicyStatus.ACTIVE.value, PolicyStatus.CANARY.value, PolicyStatus.HOLDOUT.value)
    is_of_state = sa.or_(
        sa.and_(table.c.status.in_(in_use), table.c.policy_id == policies.c.policy_id),
        table.c.version == policies.c.pinned_version,
        table.c.version == policies.c.base_version,
        table.c.version == newest.correlate(policies).scalar_subquery(),
    )
    c = policies.c
    pin = c.policy_id.label("of_policy"), c.pinned_version, c.pinned_until, c.base_version
    return sa.select(table, *pin).select_from(policies.join(table, is_of_state))


def _state(policy_id: int, found: Sequence[rows.StoredRow]) -> ServingState:
    """Return the state of a policy from its rows of the statement."""
    versions = {row.version: rows.POLICIES.record(row) for row in sorted(found, key=operator.attrgetter("version"))}
    own = [each for each in versions.values() if each.policy_id == policy_id]
    first = {each.status: each for each in reversed(own)}
    newest = next((each for each in reversed(own) if each.status is not PolicyStatus.FAILED), None)
    *_, pinned, until, base = found[0]
    undone = range(0) if until is None else range(pinned + 1, until + 1)
    if until is not None and newest is not None and newest.version > until:
        pinned = None
    return ServingState(
        active=first.get(PolicyStatus.ACTIVE),
        canary=first.get(PolicyStatus.CANARY),
        pinned=None if pinned is None else versions[pinned],
        newest=newest,
        holdout=first.get(PolicyStatus.HOLDOUT),
        base=None if base is None else versions[base],
        undone=undone,
    )
