"""Which versions engines serve: activated by the proxy, tried as canaries, held out, and pinned by a person.

At most one version of a policy is active; it is recorded as active after engines serve it. The version that should be
served (the pinned version, otherwise the newest that has not failed) is computed, not stored. A change of one policy's
versions changes nothing of another's. The states of a version:

 published ──► canary ──► active ──► retired     a person's choice makes a retired version active again
     │                      ▲  │        ▲
     └──────────────────────┘  └──► holdout
 any of them ──► failed ──► published            a person's choice lets engines load it again
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store import rows
from turnwise.store.database import Database
from turnwise.store.schema import policies
from turnwise.store.schema import policy_versions as table
from turnwise.store.versions import add_metrics, change_version, get_version, highest_version, list_versions
from turnwise.types import DEFAULT_POLICY, Json, PolicyStatus, PolicyVersion, utc_now
from turnwise.version_directory import exist_on_disk, on_disk

MAX_NAMED = 1000


class ServingState(NamedTuple):
    """The versions that decide what engines serve to the sessions of one policy."""

    active: PolicyVersion | None = None
    canary: PolicyVersion | None = None
    pinned: PolicyVersion | None = None
    newest: PolicyVersion | None = None
    holdout: PolicyVersion | None = None
    base: PolicyVersion | None = None
    """The adapter that a policy without a version samples with; None for the engine's own model."""
    served: PolicyVersion | None = None
    """The active version or the base: what sessions outside of canary and hold-out sample with."""
    undone: range = range(0)
    """The versions that a person undid, by a choice of the version before them without a pin. They stay undone until
    another version of the policy is chosen, also after a newer one was published."""

    @property
    def pinned_version(self) -> int | None:
        return None if self.pinned is None else self.pinned.version

    @property
    def in_use(self) -> set[int]:
        return {each.version for each in (self.active, self.canary, self.holdout, self.base) if each is not None}

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


def serving_state(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> ServingState:
    return _states(conn, policies.c.policy_id == policy_id).get(policy_id, NO_VERSIONS)


def serving_states(conn: sa.Connection, policy_ids: Collection[int] | None = None) -> dict[int, ServingState]:
    """Return the states of these policies, or of all that are in use, by number; one without versions is left out."""
    is_in_use = policies.c.archived_at.is_(None)
    return _states(conn, is_in_use if policy_ids is None else policies.c.policy_id.in_(policy_ids))


def _states(conn: sa.Connection, wanted: sa.ColumnElement[bool]) -> dict[int, ServingState]:
    of_policy: dict[int, list[rows.StoredRow]] = {}
    for row in conn.execute(_select_versions_of_states().where(wanted)):
        of_policy.setdefault(row.of_policy, []).append(row)
    return {policy_id: _state(policy_id, of_policy[policy_id]) for policy_id in sorted(of_policy)}


@functools.cache
def _select_versions_of_states() -> sa.Select[*tuple[Any, ...]]:
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
    versions = {row.version: rows.VERSIONS.record(row) for row in sorted(found, key=operator.attrgetter("version"))}
    own = [each for each in versions.values() if each.policy_id == policy_id]
    first = {each.status: each for each in reversed(own)}
    newest = next((each for each in reversed(own) if each.status is not PolicyStatus.FAILED), None)
    *_, pinned, until, base = found[0]
    undone = range(0) if until is None else range(pinned + 1, until + 1)
    if until is not None and newest is not None and newest.version > until:
        pinned = None
    started_from = None if base is None else versions[base]
    return ServingState(
        active=first.get(PolicyStatus.ACTIVE),
        canary=first.get(PolicyStatus.CANARY),
        pinned=None if pinned is None else versions[pinned],
        newest=newest,
        holdout=first.get(PolicyStatus.HOLDOUT),
        base=started_from,
        served=first.get(PolicyStatus.ACTIVE, started_from),
        undone=undone,
    )


def activate_version(
    conn: sa.Connection,
    version: int,
    reload_seconds: float | None = None,
    holdout_share: float = 0.0,
) -> PolicyVersion:
    """Record that engines serve this version now, and retire its policy's previous one, or make it the hold-out.

    A hold-out stays until a version is served that is not newer; without one, the previous version keeps this share
    of new sessions. A version that failed while engines loaded it stays failed. `reload_seconds` is how long engines
    paused.
    """
    policy_id = get_version(conn, version).policy_id
    state = serving_state(conn, policy_id)
    previous, holdout = state.active, state.holdout
    if holdout is not None and holdout.version >= version:
        end_holdout(conn, holdout.version)
        holdout = None
    if previous is not None and previous.version != version:
        if holdout_share > 0 and holdout is None and previous.version < version:
            change_version(conn, previous.version, status=PolicyStatus.HOLDOUT, arm_share=holdout_share)
        else:
            change_version(conn, previous.version, status=PolicyStatus.RETIRED)
    is_good = table.c.status != PolicyStatus.FAILED.value
    served = {"status": PolicyStatus.ACTIVE, "reload_seconds": reload_seconds, "activated_at": utc_now()}
    return change_version(conn, version, is_good, error=None, **served)


def fail_version(conn: sa.Connection, version: int, error: str, evidence: Json | None = None) -> PolicyVersion:
    """Record that engines could not load this version, with the error; the evidence is added to its metrics."""
    add_metrics(conn, version, evidence or {})
    return change_version(conn, version, status=PolicyStatus.FAILED, error=error)


def try_version(conn: sa.Connection, version: int, share: float | None) -> PolicyVersion:
    """Record that this share of the sessions that are created from now on samples with this version as a canary.

    Without a share engines may load it, and no session samples with it yet.
    """
    began_at = None if share is None else utc_now()
    return change_version(
        conn, version, status=PolicyStatus.CANARY, error=None, arms=None, activated_at=began_at, arm_share=share
    )


def end_holdout(conn: sa.Connection, version: int) -> None:
    """Let new sessions sample with the served version instead of this hold-out; other versions do not change."""
    change_version(conn, version, table.c.status == PolicyStatus.HOLDOUT.value, status=PolicyStatus.RETIRED)


def reconsider_version(conn: sa.Connection, version: int) -> PolicyVersion:
    """Allow a failed version, or one whose canary was cancelled, to be loaded again; other versions do not change."""
    again = table.c.status.in_([PolicyStatus.FAILED.value, PolicyStatus.CANARY.value])
    return change_version(conn, version, again, status=PolicyStatus.PUBLISHED, error=None, activated_at=None)


def pin_policy(
    conn: sa.Connection, version: int | None, *, until: int | None = None, policy_id: int = DEFAULT_POLICY
) -> None:
    """Pin a policy to this version, so that its later ones are not served; None follows the newest version again.

    The pin ends when a version above `until` is published; None keeps it.
    """
    pinned = sa.update(policies).where(policies.c.policy_id == policy_id)
    conn.execute(pinned.values(pinned_version=version, pinned_until=until))


def choose_version(conn: sa.Connection, version: int, *, pin: bool) -> PolicyVersion:
    """Serve a version to its policy's sessions, and load it again if it failed; return it.

    Without a pin it is served until a version above the newest is published, and the versions above it are undone:
    training goes on from it.
    """
    chosen = reconsider_version(conn, version)
    policy_id = chosen.policy_id
    newest = serving_state(conn, policy_id).newest
    if pin:
        pin_policy(conn, version, policy_id=policy_id)
    elif newest is None or newest.version == version:
        pin_policy(conn, None, policy_id=policy_id)
    else:
        pin_policy(conn, version, until=highest_version(conn), policy_id=policy_id)
    return chosen


def check_files_exist(db: Database, version: PolicyVersion) -> None:
    """Check that the files of a version exist, before it is chosen; as `on_disk`, it reads the file system.

    Raises:
        Conflict: they no longer exist; the message names the policy's versions that can be chosen.
    """
    if version.status is PolicyStatus.ACTIVE or on_disk(version) is not False:
        return
    with db.read() as conn:
        newest = newest_of(conn, version)
    raise files_are_gone(version, exist_on_disk(newest))


def newest_of(conn: sa.Connection, version: PolicyVersion) -> list[PolicyVersion]:
    """Return the newest versions of a version's policy, which may be chosen instead; oldest first."""
    newest, _ = list_versions(conn, limit=MAX_NAMED, policy_ids=[version.policy_id])
    return newest[::-1]


def files_are_gone(version: PolicyVersion, exist: Mapping[int, bool | None]) -> Conflict:
    """Return the error for a version without files; `exist` says of others, by number, whether they have theirs."""
    able = ", ".join(str(number) for number, has_files in exist.items() if has_files is not False)
    return Conflict(
        f"Version {version.version}'s files no longer exist ({version.path!r}): the trainer keeps as many versions as "
        f"`keep_versions` says. Choose one of: {able or 'none'}.",
        param="version",
        code="version_pruned",
    )
