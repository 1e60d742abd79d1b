"""A person's choice of the version that is served: a pin, or a version until the next one, which undoes later ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store import serving, versions
from turnwise.store.claims import is_claimable
from turnwise.store.database import Database, clock
from turnwise.store.groups import GroupChange, drop
from turnwise.store.schema import groups, policies, policy_versions
from turnwise.types import DEFAULT_POLICY, PolicyStatus, PolicyVersion
from turnwise.version_directory import exist_on_disk, on_disk

MAX_NAMED = 1000
UNDONE = "undone: its weights come from a version in whose place an older one was activated"
NOT_BY_ENGINES = (
    versions.REFUSED_BY_GATE,
    versions.ROLLED_BACK,
    versions.LOST,
    UNDONE,
    versions.OVERTAKEN,
)
"""How the error of a failed version begins where no engine refused to load it."""


def undone(state: serving.ServingState) -> range:
    """Return the versions that a person undid, by a choice of the version before them without a pin.

    They stay undone until another version of the policy is chosen, also after a newer one was published.
    """
    return range(0) if state.choice is None else range(state.choice[0] + 1, state.choice[1] + 1)


def drop_sampled_by(
    conn: sa.Connection, versions: range, policy_id: int = DEFAULT_POLICY, *, held: Collection[int] = ()
) -> GroupChange:
    """Drop the groups of a policy that could be claimed and that these versions sampled; `held` as for `claim`."""
    first = groups.c.policy_version_first
    wanted = sa.and_(
        is_claimable(conn.dialect, clock(conn), policy_id, held), first >= versions.start, first < versions.stop
    )
    return drop(wanted, "undone", "dropped %d groups of versions that were undone")


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
    chosen = serving.reconsider_version(conn, version)
    policy_id = chosen.policy_id
    newest = serving.serving_state(conn, policy_id).newest
    if pin:
        pin_policy(conn, version, policy_id=policy_id)
    elif newest is None or newest.version == version:
        pin_policy(conn, None, policy_id=policy_id)
    else:
        pin_policy(conn, version, until=versions.highest_version(conn), policy_id=policy_id)
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
    newest, _ = versions.list_versions(conn, limit=MAX_NAMED, policy_ids=[version.policy_id])
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


def failed_versions(conn: sa.Connection, numbers: Collection[int]) -> frozenset[int]:
    c = policy_versions.c
    failed = sa.select(c.version).where(c.status == PolicyStatus.FAILED.value, c.version.in_(numbers))
    return frozenset(conn.execute(failed).scalars())


def refused_in_a_row(conn: sa.Connection, count: int, policy_id: int = DEFAULT_POLICY) -> list[PolicyVersion]:
    """Return the `count` newest versions of a policy, newest first, if engines refused each of them; else none."""
    found, _ = versions.list_versions(conn, limit=count, policy_ids=[policy_id])
    is_refused = [
        each.status is PolicyStatus.FAILED and not (each.error or "").startswith(NOT_BY_ENGINES) for each in found
    ]
    return found if len(found) == count and all(is_refused) else []
