"""Deletion of one session, an end user's, a tenant's or old ones, and which forks and copies go with it.

A deletion moves sessions out of their tenant, in short transactions, so that no query finds them any more: their rows
keep only a number. `sweep` then deletes their turns and rewards, some in each transaction, so that agents do not wait
however long a session is; after a crash, any process goes on. A deletion does not change trained weights, so it returns
the policy versions that were trained on the deleted sessions; all later versions descend from them.
"""

from __future__ import annotations

import dataclasses
import datetime
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from turnwise.features.copies import SESSIONS_AT_ONCE, deepest_copies, session_copies
from turnwise.features.lineage.shaped import ShapedPolicy, keep_links, served_versions, trained_on
from turnwise.features.policies import bases_since, delete_policies
from turnwise.store import extensions
from turnwise.store.database import Database
from turnwise.store.groups import leave
from turnwise.store.rows import StoredRow, to_micros
from turnwise.store.schema import (
    DELETED,
    NO_TENANT,
    api_keys,
    groups,
    idempotency,
    policy_versions,
    rewards,
    sessions,
    trained_sessions,
    turns,
)
from turnwise.store.selection import SessionFilter, session_row
from turnwise.store.statements import ROWS_AT_ONCE, delete_some, is_among
from turnwise.store.trainer_reports import forget_in_states
from turnwise.store.turns import fitting
from turnwise.types import GroupStatus, PolicyVersion, SessionKey, SessionStatus, Split

TURNS_AT_ONCE = 100
BYTES_AT_ONCE = 4 * 2**20
"""Maximum number of turns, and of bytes of them, that one transaction deletes; the first turn may be larger."""
_OVER = [SessionStatus.ENDED.value, SessionStatus.EXPIRED.value]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """The result of a deletion."""

    sessions: tuple[SessionKey, ...] = ()
    num_turns: int = 0
    policy_versions: tuple[int, ...] = ()
    copied_versions: tuple[int, ...] = ()
    """The versions that were trained on copies of them which stay: on forks."""
    deleted_versions: tuple[PolicyVersion, ...] = ()
    """The versions of the tenant's own policies, as they were: their files are left, for `finish`."""
    num_policies: int = 0
    has_more: bool = False
    """Whether the caller has to repeat the deletion."""

    @property
    def shaped_versions(self) -> set[int]:
        """The versions that were trained on them or on copies of them; what comes from these was shaped too."""
        return {*self.policy_versions, *self.copied_versions}

    def __add__(self, other: Deleted) -> Deleted:
        deleted_versions = self.deleted_versions + other.deleted_versions
        gone = {policy.version for policy in deleted_versions}
        return Deleted(
            sessions=self.sessions + other.sessions,
            num_turns=self.num_turns + other.num_turns,
            policy_versions=tuple(sorted({*self.policy_versions, *other.policy_versions} - gone)),
            copied_versions=tuple(sorted({*self.copied_versions, *other.copied_versions} - gone)),
            deleted_versions=deleted_versions,
            num_policies=self.num_policies + other.num_policies,
            has_more=other.has_more,
        )


def delete_session(conn: sa.Connection, tenant: str, session_id: str) -> Deleted:
    """Delete a session with its turns, rewards and feedback, and what demonstrations made of it.

    Its forks stay: they are sessions of their own. Call it while it has more.
    """
    return _delete_with_copies(conn, [session_row(conn, tenant, session_id, lock=True)])


def delete_sessions(conn: sa.Connection, wanted: SessionFilter) -> Deleted:
    """Delete some sessions that a filter selects, what demonstrations made of them, and groups without a session left.

    Of an end user also the forks are deleted, whoever they are for: they hold what the user said. Call it while it has
    more.
    """
    with_forks = wanted.user_id is not None
    return _delete_first(conn, sa.select(sessions).where(*wanted.clauses()), with_forks=with_forks)


def delete_tenant(conn: sa.Connection, tenant: str) -> Deleted:
    """Delete some sessions of a tenant, or after the last of them its keys, usage, stored answers and policies.

    Call it while it has more.
    """
    if (deleted := delete_sessions(conn, SessionFilter(tenant=tenant))).has_more:
        return deleted
    for table in (groups, idempotency, api_keys, *extensions.tables_of_tenants):
        if delete_some(conn, table, table.c.tenant == tenant) == ROWS_AT_ONCE:
            return Deleted(has_more=True)
    num_policies, deleted_versions = delete_policies(conn, tenant)
    return Deleted(num_policies=num_policies, deleted_versions=tuple(deleted_versions))


def prune(conn: sa.Connection, before: datetime.datetime) -> Deleted:
    """Delete some sessions that ended before an instant, unless their group is open, ready or claimed.

    What demonstrations made of a session is deleted with it. A group that has been open since before that instant does
    not protect its sessions: its missing sessions are not expected any more. Call it while it has more.
    """
    return _delete_first(conn, _select_over(before))


def delete_all(database: Database, delete_some: Callable[[sa.Connection], Deleted]) -> Deleted:
    """Repeat a deletion while it has more, then sweep, in short transactions."""
    total = Deleted(has_more=True)
    while total.has_more:
        with database.write() as conn:
            total += delete_some(conn)
    is_left = True
    while is_left:
        with database.write() as conn:
            is_left = sweep(conn)
    database.truncate_log()
    return total


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What a deletion removed, and what of it is left."""

    num_sessions: int
    num_turns: int
    policy_versions: list[int]
    """The versions that were trained on it, oldest first; every later version of their policy descends from them."""
    served_versions: list[int]
    """The versions that were served and that it shaped: trained on it or on a fork, or come from such a version."""
    shaped_policies: list[ShapedPolicy]
    """The policies that serve such a version, or would serve it next, with what was done."""
    cloned_versions: list[int]
    """Versions since the first of those from which other policies were created."""
    num_policies: int
    """Policies of the tenant that were deleted with it."""
    deleted_versions: list[int]
    """The versions of those policies, and of the policies that were dropped."""
    directories_left: list[str]
    """Directories of those versions that were not removed: they are on another machine, or no trainer wrote them.
    Those that a version of another policy has too are left out."""


def finish(
    database: Database,
    deleted: Deleted,
    shaped: Sequence[ShapedPolicy] = (),
    dropped: Sequence[PolicyVersion] = (),
    tenant: str | None = None,
) -> Deletion:
    """Remove the files of deleted and dropped policies; return what is left, as a tenant may see it; None sees all."""
    gone = (*deleted.deleted_versions, *dropped)
    with database.read() as conn:
        served = served_versions(conn, deleted.shaped_versions, tenant)
        cloned = bases_since(conn, deleted.policy_versions)
        path = policy_versions.c.path
        is_deleted = path.in_({policy.path for policy in gone})
        is_gone = policy_versions.c.version.in_({policy.version for policy in gone})
        in_use = set(conn.execute(sa.select(path).where(is_deleted, ~is_gone)).scalars())
    return Deletion(
        num_sessions=len(deleted.sessions),
        num_turns=deleted.num_turns,
        policy_versions=list(deleted.policy_versions),
        served_versions=served,
        shaped_policies=list(shaped),
        cloned_versions=cloned,
        num_policies=deleted.num_policies,
        deleted_versions=[policy.version for policy in gone],
        directories_left=_remove_files(gone, in_use),
    )


def _select_over(before: datetime.datetime) -> sa.Select[*tuple[Any, ...]]:
    unfinished, part = [GroupStatus.READY.value, GroupStatus.CLAIMED.value], groups.alias()
    waiting = sa.or_(
        groups.c.status.in_(unfinished),
        # Few groups are unfinished at a time, so the parts among them are read once, and not for each session.
        groups.c.group_pk.in_(
            sa.select(part.c.part_of).where(part.c.status.in_(unfinished), part.c.part_of.is_not(None))
        ),
        sa.and_(groups.c.status == GroupStatus.OPEN.value, groups.c.last_active_at >= to_micros(before)),
    )
    return (
        sa.select(sessions)
        .outerjoin(groups, sessions.c.group_pk == groups.c.group_pk)
        .where(
            sessions.c.status.in_(_OVER),
            sessions.c.last_active_at < to_micros(before),
            sa.or_(sessions.c.group_pk.is_(None), ~waiting),
        )
    )


def _delete_first(conn: sa.Connection, wanted: sa.Select[*tuple[Any, ...]], *, with_forks: bool = False) -> Deleted:
    found = conn.execute(wanted.limit(SESSIONS_AT_ONCE).with_for_update(of=sessions)).all()
    return dataclasses.replace(_delete_with_copies(conn, found, with_forks=with_forks), has_more=bool(found))


def _delete_with_copies(conn: sa.Connection, found: Sequence[StoredRow], *, with_forks: bool = False) -> Deleted:
    """Delete sessions of which there are no copies. Else delete copies, and say that there is more."""
    deepest = deepest_copies(conn, found, with_forks=with_forks)
    deleted = _delete(conn, deepest)
    source = sa.tuple_(session_copies.c.tenant, session_copies.c.source_id)
    conn.execute(sa.delete(session_copies).where(source.in_(deleted.sessions)))  # of forks, which stay
    return dataclasses.replace(deleted, has_more=deleted.has_more or deepest is not found)


def _delete(conn: sa.Connection, found: Sequence[StoredRow]) -> Deleted:
    """Move sessions out of their tenant, without all that names a person or a task; `sweep` deletes the rest."""
    names = tuple((row.tenant, row.session_id) for row in found)
    if not found:
        return Deleted()
    if _forget_answers(conn, names) == ROWS_AT_ONCE:
        return Deleted(has_more=True)
    pks = [row.session_pk for row in found]
    own, copied = trained_on(conn, pks)
    keep_links(conn, pks)
    for table in (session_copies, trained_sessions, *extensions.tables_of_sessions):
        conn.execute(sa.delete(table).where(is_among(conn.dialect, table.c.session_pk, pks)))
    for forget in extensions.after_deletion:
        forget(conn, pks)
    nothing = dict.fromkeys(
        ("group_pk", "group_id", "group_size", "task_id", "user_id", "key_id", "agent", "termination_reason")
    )
    conn.execute(
        sa.update(sessions)
        .where(is_among(conn.dialect, sessions.c.session_pk, pks))
        .values(
            **nothing,
            tenant=NO_TENANT,
            session_id=sa.cast(sessions.c.session_pk, sa.Text),
            status=DELETED,
            split=Split.TRAIN.value,
            metadata="{}",
            sampling="{}",
            num_turns=0,
            num_rewards=0,
        )
    )
    finished = (row for row in found if row.status != SessionStatus.OPEN and row.num_rewards > 0)
    gone = leave(conn, (row.group_pk for row in found), (row.group_pk for row in finished))
    forget_in_states(conn, names, gone)
    return Deleted(
        sessions=names,
        num_turns=sum(row.num_turns for row in found),
        policy_versions=tuple(sorted(own)),
        copied_versions=tuple(sorted(copied - own)),
    )


def _forget_answers(conn: sa.Connection, deleted: Sequence[SessionKey]) -> int:
    """Delete answers for deleted sessions, at most `ROWS_AT_ONCE`; return their number."""
    c, dialect = idempotency.c, conn.dialect
    # The databases search by the first two conditions; the last one excludes other sessions of these tenants and ids.
    tenants, ids = {tenant for tenant, _ in deleted}, {session_id for _, session_id in deleted}
    is_searched = is_among(dialect, c.tenant, tenants), is_among(dialect, c.session_id, ids)
    return delete_some(conn, idempotency, sa.and_(*is_searched, sa.tuple_(c.tenant, c.session_id).in_(deleted)))


def sweep(conn: sa.Connection) -> bool:
    """Delete some rows of a deleted session; return whether any deleted session was left.

    Call it until none is left. Several processes may do so, each with another session.
    """
    oldest = sa.select(sessions.c.session_pk).where(sessions.c.status == DELETED).order_by(sessions.c.last_active_at)
    session_pk = conn.execute(oldest.limit(1).with_for_update(skip_locked=True)).scalar_one_or_none()
    if session_pk is None:
        return False
    first = sa.select(turns.c.turn_id).where(turns.c.session_pk == session_pk).order_by(turns.c.seq)
    turn_ids = list(conn.execute(first.limit(TURNS_AT_ONCE)).scalars())
    if turn_ids:
        some = fitting(conn, turn_ids, BYTES_AT_ONCE)
        conn.execute(sa.delete(turns).where(turns.c.turn_id.in_(some)))
    elif delete_some(conn, rewards, rewards.c.session_pk == session_pk) < ROWS_AT_ONCE and not any(
        sweep_some(conn, session_pk) for sweep_some in extensions.sweeps
    ):
        conn.execute(sa.delete(sessions).where(sessions.c.session_pk == session_pk))
    return True


def _remove_files(deleted: Iterable[PolicyVersion], in_use: Collection[str] = ()) -> list[str]:
    """Remove the directories of deleted policies that a trainer wrote; return those of versions that are left.

    A trainer's directory of a policy has its number as its name. What was published from elsewhere, or is on another
    machine, is left. A directory that another policy's version has too is in use: nobody is to remove it, so it is
    not returned. As `on_disk`, it reads the file system.
    """
    left = []
    for version in deleted:
        directory = Path(version.path)
        is_trained = version.update_id is not None and directory.parent.name == str(version.policy_id)
        if is_trained and directory.is_absolute() and directory.parent.is_dir():
            shutil.rmtree(directory.parent, ignore_errors=True)
        is_gone = is_trained and directory.parent.parent.is_dir() and not directory.exists()
        if not is_gone and version.path not in in_use:
            left.append(version.path)
    return left
