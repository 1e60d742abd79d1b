"""Groups of sessions that are compared: when one is complete, or goes on without its missing runs, or is dropped.

A group's state changes in the transaction of the session that causes the change, so a group is ready at the commit
that completes it. Turns do not change groups, because turns are the hot path.

All sessions of a group have one policy of their own. What a feature has with groups follows in the same transaction.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store import extensions
from turnwise.store.extensions import GroupEvent
from turnwise.store.rows import StoredRow, to_micros
from turnwise.store.schema import HAS_TRAINABLE_OUTCOME, groups, sessions, turns
from turnwise.store.selection import LockedSession, has_policy
from turnwise.store.statements import insert_new_rows, is_among, unindexed
from turnwise.types import DEFAULT_POLICY, IMPORT, GroupKey, GroupStatus, Session, SessionKey, SessionStatus, utc_now

log = logging.getLogger(__name__)

NAMED_GROUPS = 20
MOST_UNFINISHED = 10_000
OPEN_WITH_REWARD = sa.and_(
    sessions.c.status == sa.literal_column(f"'{SessionStatus.OPEN.value}'"),
    sessions.c.num_rewards > sa.literal_column("0"),
)
"""The SQL condition for an open session with a reward; its index serves only a query with these literals."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupChange:
    """A change of all groups that fulfil a condition. A wait repeats it, so it is read first and seldom written."""

    wanted: sa.ColumnElement[bool]
    values: Mapping[str, Any]
    done: str
    """The rest of a log line that begins with the number of groups."""

    def is_due(self, conn: sa.Connection) -> bool:
        return bool(conn.execute(sa.select(groups.c.group_pk).where(self.wanted)).all())

    def make(self, conn: sa.Connection) -> list[str]:
        change = sa.update(groups).where(self.wanted).values(**self.values)
        found = conn.execute(change.returning(groups.c.group_id, groups.c.group_pk)).all()
        changed = [row.group_id for row in found]
        if changed:
            _note(conn, GroupEvent.CLOSED, [row.group_pk for row in found])
            named = ", ".join(changed[:NAMED_GROUPS]) + (" …" if len(changed) > NAMED_GROUPS else "")
            log.warning("%s: %s", self.done % len(changed), named)
        return changed


def drop(wanted: sa.ColumnElement[bool], reason: str, done: str) -> GroupChange:
    return GroupChange(wanted, {"status": GroupStatus.DROPPED.value, "leased_until": None, "reason": reason}, done)


def ready(reason: str, now: datetime.datetime | None = None) -> dict[str, Any]:
    return {"status": GroupStatus.READY.value, "ready_at": to_micros(now or utc_now()), "reason": reason}


def is_group(tenant: str, group_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    return groups.c.tenant == tenant, groups.c.group_id == group_id, groups.c.part_of.is_(None)


def join(conn: sa.Connection, session: Session) -> int:
    """Count the session in its group, and create the group with its first session; return the group's key."""
    new = _new_group(session)
    if created := insert_new_rows(conn, groups, [new], "group_pk"):
        return int(created[0][0])
    group = conn.execute(sa.select(groups).where(*is_group(new["tenant"], new["group_id"])).with_for_update()).one()
    _check_joinable(group, session)
    conn.execute(
        sa.update(groups)
        .where(groups.c.group_pk == group.group_pk)
        .values(
            group_size=sa.func.coalesce(groups.c.group_size, new["group_size"]),
            num_sessions=groups.c.num_sessions + 1,
            last_active_at=new["last_active_at"],
        )
    )
    return int(group.group_pk)


def create(conn: sa.Connection, alone: Sequence[Session]) -> dict[SessionKey, int]:
    """Create a group for each of these sessions, which name none.

    Returns:
        The groups' keys by their sessions; without the sessions whose id is the id of a group.
    """
    created = insert_new_rows(conn, groups, list(map(_new_group, alone)), "tenant", "group_id", "group_pk")
    return {(tenant, session_id): group_pk for tenant, session_id, group_pk in created}


def _new_group(session: Session) -> dict[str, Any]:
    is_alone = session.group_id is None
    return {
        "tenant": session.tenant,
        "group_id": session.session_id if is_alone else session.group_id,
        "group_size": 1 if is_alone else session.group_size,
        "status": GroupStatus.OPEN.value,
        "num_sessions": 1,
        "num_finished": 0,
        "policy_id": session.policy_id,
        "last_active_at": to_micros(session.created_at),
        "fencing_token": 0,
        "imported": 1 if session.opened_by == IMPORT else None,
    }


def _check_joinable(group: StoredRow, session: Session) -> None:
    if session.group_id is None:
        raise Conflict(f"session id {session.session_id!r} is the id of a group; choose another", param="session_id")
    if group.status != GroupStatus.OPEN:
        raise Conflict(
            f"group {group.group_id!r} is {group.status} and takes no more sessions; use a new group_id",
            param="group_id",
        )
    if group.policy_id != session.policy_id:
        raise Conflict(
            f"group {group.group_id!r} has sessions of another policy, and the sessions of a group are compared with "
            "each other; use a group of its own for each policy",
            param="group_id",
            code="group_of_another_policy",
        )
    if None not in (session.group_size, group.group_size) and session.group_size != group.group_size:
        raise Conflict(
            f"group {group.group_id!r} has size {group.group_size}, not {session.group_size!r}", param="group_size"
        )


def leave(
    conn: sa.Connection, group_pks: Iterable[int | None], finished_pks: Iterable[int | None] = ()
) -> list[GroupKey]:
    """Subtract a session from its group for each of these keys; delete and return the groups without a session left.

    None stands for a session without a group; the finished keys are those of the sessions that are counted as finished.
    """
    num_left = collections.Counter(pk for pk in group_pks if pk is not None)
    num_finished = collections.Counter(finished_pks)
    if not num_left:
        return []
    left, finished = sa.bindparam("num_left", type_=sa.Integer), sa.bindparam("num_finished_left", type_=sa.Integer)
    conn.execute(
        sa.update(groups)
        .where(groups.c.group_pk == sa.bindparam("pk"))
        .values(num_sessions=groups.c.num_sessions - left, num_finished=groups.c.num_finished - finished),
        [{"pk": pk, "num_left": num_left[pk], "num_finished_left": num_finished[pk]} for pk in sorted(num_left)],
    )
    empty = sa.and_(is_among(conn.dialect, groups.c.group_pk, num_left), groups.c.num_sessions <= 0)
    found = conn.execute(
        sa.delete(groups).where(empty).returning(groups.c.tenant, groups.c.group_id, groups.c.group_pk)
    )
    gone = found.all()
    if gone:
        _note(conn, GroupEvent.GONE, [row.group_pk for row in gone])
    return [(row.tenant, row.group_id) for row in gone]


def set_size(conn: sa.Connection, group_pk: int, session: Session) -> None:
    group = conn.execute(sa.select(groups).where(groups.c.group_pk == group_pk).with_for_update()).one()
    _check_joinable(group, session)
    is_complete = group.num_finished >= (session.group_size or 0)
    changed = {"status": GroupStatus.READY.value, "ready_at": to_micros(utc_now())} if is_complete else {}
    conn.execute(
        sa.update(groups).where(groups.c.group_pk == group_pk).values(group_size=session.group_size, **changed)
    )
    if is_complete:
        _note(conn, GroupEvent.CLOSED, [group_pk])


def reopen(conn: sa.Connection, group_pks: Collection[int]) -> None:
    # SQLite must search by the keys, not by the status, which most groups have.
    is_trained = unindexed(groups.c.status) == GroupStatus.TRAINED.value
    revised = sa.update(groups).where(is_among(conn.dialect, groups.c.group_pk, group_pks), is_trained)
    conn.execute(revised.values(**ready("revised")))
    _note(conn, GroupEvent.REVISED, group_pks)


def finish(conn: sa.Connection, finished: Iterable[StoredRow | LockedSession]) -> None:
    """Count sessions as finished in their groups, and make complete groups ready.

    A group also stores the oldest policy version among the trainable turns of its finished sessions.
    """
    new = [(row.group_pk, row.session_pk) for row in finished if row.group_pk is not None]
    if not new:
        return
    instant = to_micros(utc_now())
    num_new = collections.Counter(group_pk for group_pk, _ in new)
    oldest = _oldest_versions(conn, [session_pk for _, session_pk in new])
    number = sa.bindparam("num_new", type_=sa.Integer)
    version = sa.bindparam("version", type_=sa.Integer)
    known = groups.c.policy_version_first
    complete = sa.and_(groups.c.status == GroupStatus.OPEN.value, groups.c.num_finished + number >= groups.c.group_size)
    conn.execute(
        sa.update(groups)
        .where(groups.c.group_pk == sa.bindparam("pk"))
        .values(
            num_finished=groups.c.num_finished + number,
            status=sa.case((complete, GroupStatus.READY.value), else_=groups.c.status),
            ready_at=sa.case((complete, instant), else_=groups.c.ready_at),
            last_active_at=instant,
            policy_version_first=sa.case((sa.or_(known.is_(None), known > version), version), else_=known),
        ),
        # A fixed order prevents deadlocks between two writers.
        [{"pk": pk, "num_new": num_new[pk], "version": oldest.get(pk)} for pk in sorted(num_new)],
    )
    _note(conn, GroupEvent.CLOSED, num_new)


def take_back(conn: sa.Connection, group_pk: int) -> None:
    """Count one finished session of a group less: it has no reward any more. A claimed or trained group stays that."""
    left = groups.c.num_finished - 1
    waits = sa.and_(groups.c.status == GroupStatus.READY.value, left < groups.c.group_size)
    conn.execute(
        sa.update(groups)
        .where(groups.c.group_pk == group_pk, groups.c.num_finished > 0)
        .values(
            num_finished=left,
            status=sa.case((waits, GroupStatus.OPEN.value), else_=groups.c.status),
            ready_at=sa.case((waits, None), else_=groups.c.ready_at),
        )
    )
    _note(conn, GroupEvent.OPENED, [group_pk])


def _note(conn: sa.Connection, event: GroupEvent, group_pks: Collection[int]) -> None:
    for note in extensions.of_groups:
        note(conn, event, group_pks)


def _oldest_versions(conn: sa.Connection, session_pks: Sequence[int]) -> dict[int, int]:
    found = conn.execute(
        sa.select(sessions.c.group_pk, sa.func.min(turns.c.policy_version_first).label("version"))
        .join_from(turns, sessions)
        .where(
            is_among(conn.dialect, turns.c.session_pk, session_pks),
            HAS_TRAINABLE_OUTCOME,
            turns.c.policy_id == sessions.c.policy_id,
        )
        .group_by(sessions.c.group_pk)
    )
    return {row.group_pk: row.version for row in found}


def num_open_with_reward(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> int:
    """Count a policy's sessions that only have to end to be trained, up to `MOST_UNFINISHED`."""
    waiting = sa.select(sessions.c.session_pk).where(
        OPEN_WITH_REWARD,
        sessions.c.group_pk.is_not(None),
        has_policy(lambda column: column == policy_id),
        sessions.c.train == 1,
    )
    counted = sa.select(sa.func.count()).select_from(waiting.limit(MOST_UNFINISHED).subquery())
    return int(conn.execute(counted).scalar_one())


def unfinished_groups(conn: sa.Connection, tenant: str | None = None) -> dict[str, int]:
    """Count the open, ready and claimed groups of all tenants or of one, at most `MOST_UNFINISHED` of each.

    Groups that agents gave up stay open until they are pruned, so there may be any number of them.
    """
    status = groups.c.status
    unfinished = [GroupStatus.OPEN.value, GroupStatus.READY.value, GroupStatus.CLAIMED.value]
    of_tenant = [] if tenant is None else [groups.c.tenant == tenant]
    some = [
        sa.select(status).where(status == value, *of_tenant).limit(MOST_UNFINISHED).subquery() for value in unfinished
    ]
    counted = [sa.select(sa.func.count()).select_from(each).scalar_subquery() for each in some]
    return dict(zip(unfinished, conn.execute(sa.select(*counted)).one(), strict=True))
