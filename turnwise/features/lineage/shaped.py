"""What a deletion leaves shaped: the versions that come from what was deleted, and the policies that serve them.

A deletion changes no weights. A person chooses what follows: nothing, the last version that what was deleted did not
shape, or the end of the policy.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from turnwise.features import policies, rewinds
from turnwise.features.copies import session_copies
from turnwise.features.lineage.versions import descendants, parents, version_sessions
from turnwise.store import rows, serving, versions
from turnwise.store.database import Database
from turnwise.store.policies import find_policy, list_policies
from turnwise.store.schema import policy_versions, sessions, trained_sessions
from turnwise.store.statements import insert_new_rows, is_among
from turnwise.types import DEFAULT_POLICY, PolicyStatus, PolicyVersion, SessionKey
from turnwise.version_directory import on_disk

DROPPED = "dropped with its policy: deleted sessions shaped it"
IN_USE = frozenset(PolicyStatus) - serving.IDLE


class Then(enum.StrEnum):
    """What follows for a policy that serves a version which deleted sessions shaped."""

    NOTHING = "nothing"
    """It stays served."""
    ROLLBACK = "rollback"
    """The last clean version is served, and training goes on from it."""
    DROP = "drop"
    """The policy is archived and its files are removed; the default policy goes back to the base model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShapedPolicy:
    """A policy that serves a version which deleted sessions shaped, or would serve it next."""

    tenant: str
    """Its owner; empty for the default policy."""
    policy: str
    shaped_version: int
    clean_version: int | None
    """Its newest version that they did not shape and that has its files; None without one."""
    then: Then = Then.NOTHING
    """What was done."""
    reason: str | None = None
    """Why that is not what was asked for; None where it is."""


def trained_on(conn: sa.Connection, session_pks: Collection[int]) -> tuple[set[int], set[int]]:
    """Return the versions that were trained on sessions, and those that were trained on sessions with their turns."""
    given, own, others = set(session_pks), set[int](), set[int]()
    holding, level = set(given), set(given)
    while level:
        level = {copy.session_pk for copy in _copies(conn, level)} - holding
        holding |= level
    for row in _trained(conn, holding):
        (own if row.session_pk in given and not row.is_copied else others).add(row.version)
    return own, others


def _trained(conn: sa.Connection, session_pks: Collection[int]) -> Sequence[rows.StoredRow]:
    """Return the versions that were trained on sessions, or on deleted ones that had copied them."""
    c, noted = trained_sessions.c, version_sessions.c
    recorded = sa.select(c.session_pk, c.policy_version.label("version"), sa.literal(0).label("is_copied"))
    of_noted = sa.select(noted.session_pk, noted.version, noted.is_copied)
    return [
        *conn.execute(recorded.where(is_among(conn.dialect, c.session_pk, session_pks))),
        *conn.execute(of_noted.where(is_among(conn.dialect, noted.session_pk, session_pks))),
    ]


def _copies(conn: sa.Connection, session_pks: Collection[int]) -> Sequence[rows.StoredRow]:
    """Return the sessions that hold copies of turns of some."""
    held, c = sessions.c, session_copies.c
    named = sa.select(held.tenant, held.session_id, held.session_pk)
    found = conn.execute(named.where(is_among(conn.dialect, held.session_pk, session_pks))).all()
    names = {(row.tenant, row.session_id): row.session_pk for row in found}
    copies = conn.execute(
        sa.select(c.session_pk, c.made_by, c.tenant, c.source_id).where(
            is_among(conn.dialect, c.tenant, {tenant for tenant, _ in names}),
            is_among(conn.dialect, c.source_id, {session_id for _, session_id in names}),
        )
    )
    return [copy for copy in copies if (copy.tenant, copy.source_id) in names]


def _behind(conn: sa.Connection, session_pks: Collection[int]) -> dict[int, dict[int, SessionKey]]:
    """Return the sessions that each of some copied, directly or through others: their keys and names."""
    held, c = sessions.c, session_copies.c
    direct: dict[int, dict[int, SessionKey]] = {}
    level = set(session_pks)
    while level:
        copied = sa.select(c.session_pk, c.tenant, c.source_id)
        found = conn.execute(copied.where(is_among(conn.dialect, c.session_pk, level))).all()
        named = sa.select(held.session_pk, held.tenant, held.session_id).where(
            is_among(conn.dialect, held.tenant, {row.tenant for row in found}),
            is_among(conn.dialect, held.session_id, {row.source_id for row in found}),
        )
        pks = {(row.tenant, row.session_id): row.session_pk for row in conn.execute(named)} if found else {}
        direct |= {pk: {} for pk in level}
        for row in found:
            if (name := (row.tenant, row.source_id)) in pks:
                direct[row.session_pk][pks[name]] = name
        level = {pk for copier in level for pk in direct[copier]} - direct.keys()
    behind = {pk: dict(direct[pk]) for pk in session_pks}
    for found_of in behind.values():
        waiting = [*found_of]
        while waiting:
            further = {pk: name for pk, name in direct[waiting.pop()].items() if pk not in found_of}
            found_of |= further
            waiting += further
    return {pk: found_of for pk, found_of in behind.items() if found_of}


def keep_links(conn: sa.Connection, session_pks: Collection[int]) -> None:
    """Let what sessions link stay linked when they are deleted: copies of them, and versions, with what they copied."""
    sources = _behind(conn, session_pks)
    if not sources:
        return
    links = [
        {"session_pk": copy.session_pk, "source_id": session_id, "tenant": tenant, "made_by": copy.made_by}
        for gone, of in sources.items()
        for copy in _copies(conn, [gone])
        for tenant, session_id in of.values()
    ]
    shaped = [
        {"session_pk": pk, "version": trained.version, "is_copied": 1}
        for trained in _trained(conn, sources)
        for pk in sources[trained.session_pk]
    ]
    insert_new_rows(conn, session_copies, links, "1")
    insert_new_rows(conn, version_sessions, shaped, "1")


def shaped_policies(database: Database, roots: Collection[int], tenant: str | None = None) -> list[ShapedPolicy]:
    """Return the policies that serve a version which comes from these, as a tenant may see them; None sees all.

    It reads the file system, so it is called outside of a transaction.
    """
    found: list[tuple[ShapedPolicy, Sequence[PolicyVersion]]] = []
    with database.read() as conn:
        shaped, states = descendants(parents(conn), roots), serving.serving_states(conn)
        for policy in list_policies(conn, tenant) if roots else ():
            state = states.get(policy.policy_id, serving.NO_VERSIONS)
            target = () if state.target is None else (state.target.version,)
            served = shaped & {*state.in_use, *target}
            if served:
                listed, _ = versions.list_versions(conn, limit=rewinds.MAX_NAMED, policy_ids=[policy.policy_id])
                clean = [each for each in listed if each.version not in shaped and each.status != PolicyStatus.FAILED]
                found.append(
                    (
                        ShapedPolicy(
                            tenant=policy.tenant,
                            policy=policy.name,
                            shaped_version=max(served),
                            clean_version=None,
                        ),
                        clean,
                    )
                )
    return [
        dataclasses.replace(each, clean_version=next((one.version for one in clean if on_disk(one) is not False), None))
        for each, clean in found
    ]


def served_versions(conn: sa.Connection, roots: Collection[int], tenant: str | None = None) -> list[int]:
    """Return the versions that were served and come from these, of policies that a tenant may see; None sees all."""
    c, seen = policy_versions.c, {policy.policy_id for policy in list_policies(conn, tenant)}
    shaped = descendants(parents(conn), roots) if roots else set()
    was_served = sa.or_(c.activated_at.is_not(None), c.status.in_([each.value for each in IN_USE]))
    found = sa.select(c.version).where(is_among(conn.dialect, c.version, shaped), was_served, c.policy_id.in_(seen))
    return list(conn.execute(found.order_by(c.version)).scalars())


def follow(conn: sa.Connection, shaped: ShapedPolicy, then: Then) -> tuple[ShapedPolicy, list[PolicyVersion]]:
    """Do what a person chose for a policy; return what was done, and the versions whose files are to be removed."""
    policy = find_policy(conn, shaped.tenant, shaped.policy)
    is_default = policy.policy_id == DEFAULT_POLICY
    if then is Then.DROP and not is_default:
        policies.archive_policy(conn, policy.tenant, policy.name)
        own = policy_versions.c.policy_id == policy.policy_id
        found = [rows.VERSIONS.record(row) for row in conn.execute(sa.select(policy_versions).where(own))]
        failed: dict[str, Any] = {"status": PolicyStatus.FAILED.value, "error": DROPPED}
        conn.execute(sa.update(policy_versions).where(own).values(**failed))
        return dataclasses.replace(shaped, then=then), found
    clean = 0 if then is Then.DROP and versions.known_version(conn, 0) is not None else shaped.clean_version
    if then is Then.NOTHING:
        return shaped, []
    if clean is None:
        reason = f"policy {policy.name!r} has no version with its files that they did not shape"
        return dataclasses.replace(shaped, reason=reason), []
    rewinds.choose_version(conn, clean, pin=False)
    return dataclasses.replace(shaped, then=then, clean_version=clean), []
