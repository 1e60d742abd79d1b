"""Which versions engines serve: which of a policy is active, which one should be, and which some sessions sample with.

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

from turnwise.store import rows
from turnwise.store.schema import policies
from turnwise.store.schema import policy_versions as table
from turnwise.store.versions import add_metrics, change_version, get_version
from turnwise.types import DEFAULT_POLICY, Json, PolicyStatus, PolicyVersion, Session, utc_now

IDLE = frozenset({PolicyStatus.PUBLISHED, PolicyStatus.RETIRED, PolicyStatus.FAILED})
"""The states of versions that no session samples with."""


class ServingState(NamedTuple):
    """The versions that decide what engines serve to the sessions of one policy."""

    active: PolicyVersion | None = None
    beside: Mapping[PolicyStatus, PolicyVersion] = {}
    """The versions that only some sessions sample with, by their state."""
    newest: PolicyVersion | None = None
    base: PolicyVersion | None = None
    """The adapter that a policy without a version samples with; None for the engine's own model."""
    served: PolicyVersion | None = None
    """The active version or the base: what most sessions sample with."""
    pinned: PolicyVersion | None = None
    choice: tuple[int, int] | None = None
    """The version that a person chose until the next one, and the highest one then, which stay named after that."""

    @property
    def pinned_version(self) -> int | None:
        return None if self.pinned is None else self.pinned.version

    @property
    def in_use(self) -> set[int]:
        return {each.version for each in (self.active, self.base, *self.beside.values()) if each is not None}

    @property
    def target(self) -> PolicyVersion | None:
        """The version to serve: the pinned one, or the newest that has not failed."""
        wanted = self.pinned or self.newest
        if wanted is not None and wanted.status is PolicyStatus.FAILED:
            return self.active or self.newest
        return wanted

    def of_session(self, session: Session) -> PolicyVersion | None:
        """Return the version that a session samples with; None for the one that is served."""
        return next((each for each in self.beside.values() if each.version == session.arm), None)


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
    in_use = [status.value for status in PolicyStatus if status not in IDLE]
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
    in_use = {each.status: each for each in reversed(own) if each.status not in IDLE}
    newest = next((each for each in reversed(own) if each.status is not PolicyStatus.FAILED), None)
    *_, pinned, until, base = found[0]
    is_over = until is not None and newest is not None and newest.version > until
    active, started_from = in_use.pop(PolicyStatus.ACTIVE, None), None if base is None else versions[base]
    return ServingState(
        active=active,
        beside=in_use,
        newest=newest,
        base=started_from,
        served=active or started_from,
        pinned=None if pinned is None or is_over else versions[pinned],
        choice=None if until is None else (pinned, until),
    )


def activate_version(conn: sa.Connection, version: int, reload_seconds: float | None = None) -> PolicyVersion:
    """Record that engines serve this version now, and retire its policy's previous one.

    A version that failed while engines loaded it stays failed. `reload_seconds` is how long engines paused.
    """
    previous = serving_state(conn, get_version(conn, version).policy_id).active
    if previous is not None and previous.version != version:
        change_version(conn, previous.version, status=PolicyStatus.RETIRED)
    is_good = table.c.status != PolicyStatus.FAILED.value
    served = {"status": PolicyStatus.ACTIVE, "reload_seconds": reload_seconds, "activated_at": utc_now()}
    return change_version(conn, version, is_good, error=None, **served)


def fail_version(conn: sa.Connection, version: int, error: str, evidence: Json | None = None) -> PolicyVersion:
    """Record that engines could not load this version, with the error; the evidence is added to its metrics."""
    add_metrics(conn, version, evidence or {})
    return change_version(conn, version, status=PolicyStatus.FAILED, error=error)


def reconsider_version(conn: sa.Connection, version: int) -> PolicyVersion:
    """Allow a failed version, or one whose trial was cancelled, to be loaded again; other versions do not change."""
    again = table.c.status.in_([PolicyStatus.FAILED.value, PolicyStatus.CANARY.value])
    return change_version(conn, version, again, status=PolicyStatus.PUBLISHED, error=None, activated_at=None)
