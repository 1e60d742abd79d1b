"""Sessions: their creation, their changes, their end, also by idleness, and how one is read.

Every function runs in the caller's transaction, so the proxy commits all waiting writes together, and ending a session
with a reward is one commit. A session is *finished* when it is over (ended or expired) and has a reward. The write
that finishes a session counts it in its group, and the write that finishes the last session makes the group ready.

The fields that training reads can change while the session is open and its group accepts sessions; metadata and the
user can change at any time. If any of the given fields can no longer change, the request is a conflict and nothing
changes. A session's reward is computed from its lines on every read, so late rewards take effect immediately.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence

import sqlalchemy as sa

from turnwise import credit
from turnwise.errors import Conflict, InvalidRequest, NotFound, TurnwiseError
from turnwise.store import extensions, groups, rows
from turnwise.store.rewards import add_rewards, rewards_of
from turnwise.store.rows import to_micros
from turnwise.store.schema import sessions, turns
from turnwise.store.selection import LockedSession, SessionFilter, session_row, session_rows
from turnwise.store.statements import fetch_rows, insert_new_rows, is_among
from turnwise.store.updates import Updates, trained_in
from turnwise.types import Credit, Reward, Session, SessionKey, SessionStatus, Split, utc_now

CLOSED_AT_ONCE = 500
Created = tuple[Session, bool] | TurnwiseError
"""The stored session and whether it was created; or the error that rejects it."""
_GROUPING = frozenset({"group_id", "group_size", "split"})


def create_session(conn: sa.Connection, session: Session) -> tuple[Session, bool]:
    """Create a session and add it to its group, once for its tenant and id; return it and whether it is new.

    Raises:
        Conflict: its group is complete, has another size, or is the group of a single session.
    """
    (created,) = create_sessions(conn, [session])
    if isinstance(created, TurnwiseError):
        raise created
    return created


def create_sessions(conn: sa.Connection, wanted: Sequence[Session]) -> list[Created]:
    """Create the sessions that are not stored; a rejected session affects no other.

    The number of statements does not depend on the number of new sessions that name no group.
    """
    first = {_key(session): session for session in reversed(wanted)}
    new = _insert_new(conn, first)
    results: list[Created] = []
    for session in wanted:
        result = new.get(_key(session))
        if first[_key(session)] is not session:
            (result,) = create_sessions(conn, [session])
        elif result is None or isinstance(result, Conflict):  # it is stored; another writer may have done so just now
            try:
                result = read_session(conn, session.tenant, session.session_id), False
            except NotFound as missing:
                result = result or missing
        results.append(result)
    return results


def _key(session: Session) -> SessionKey:
    return session.tenant, session.session_id


def _insert_new(conn: sa.Connection, wanted: Mapping[SessionKey, Session]) -> dict[SessionKey, Created]:
    """Insert those of the sessions that are new; return their results by their keys.

    Groups and sessions are written in the order of their ids, so that two writers cannot deadlock.
    """
    results: dict[SessionKey, Created] = {
        key: InvalidRequest(f"group_size {session.group_size!r} needs a group_id; give one", param="group_id")
        for key, session in wanted.items()
        if session.group_size is not None and session.group_id is None
    }
    names = {"tenant": [tenant for tenant, _ in wanted], "session_id": [session_id for _, session_id in wanted]}
    stored = set(fetch_rows(conn, sessions, tuple(names), names))
    new_sessions = [wanted[key] for key in sorted(wanted.keys() - stored - results.keys())]
    for rule in extensions.opened:
        new_sessions = rule(conn, new_sessions)
    trained = [session for session in new_sessions if session.split is Split.TRAIN and session.train]
    group_pks = groups.create(conn, [session for session in trained if session.group_id is None])
    joining = [session for session in trained if _key(session) not in group_pks]
    for session in sorted(joining, key=lambda each: (each.tenant, each.group_id or each.session_id)):
        try:
            group_pks[_key(session)] = groups.join(conn, session)
        except Conflict as error:
            results[_key(session)] = error
    new = {_key(session): session for session in new_sessions if _key(session) not in results}
    new_rows = [rows.session_row(session, group_pks.get(key)) for key, session in new.items()]
    created = set(insert_new_rows(conn, sessions, new_rows, "tenant", "session_id"))
    # Other writers may have created some of the sessions meanwhile.
    groups.leave(conn, [pk for key, pk in group_pks.items() if key not in created])
    return results | {
        key: (dataclasses.replace(session, last_active_at=session.created_at), True)
        for key, session in new.items()
        if key in created
    }


def end_session(
    conn: sa.Connection, tenant: str, session_id: str, reason: str | None = None, *, reward: Reward | None = None
) -> Session:
    """End a session, with an optional last reward; ending it again changes only its rewards.

    Raises:
        Conflict: it has expired.
    """
    if reward is not None:
        add_rewards(conn, [reward])
    row = session_row(conn, tenant, session_id, lock=True)
    if row.status == SessionStatus.EXPIRED:
        raise Conflict(f"session {session_id!r} has expired; create a new one", code="session_expired")
    if row.status == SessionStatus.OPEN:
        _close(conn, [row], SessionStatus.ENDED, reason)
    return read_session(conn, tenant, session_id)


def _close(
    conn: sa.Connection, found: Sequence[rows.StoredRow], status: SessionStatus, reason: str | None = None
) -> None:
    conn.execute(
        sa.update(sessions)
        .where(is_among(conn.dialect, sessions.c.session_pk, [row.session_pk for row in found]))
        .values(status=status.value, termination_reason=reason, ended_at=to_micros(utc_now()))
    )
    groups.finish(conn, [row for row in found if row.num_rewards > 0])


def expire_idle_sessions(conn: sa.Connection, idle_before: datetime.datetime) -> list[SessionKey]:
    """Expire open sessions without activity since then, at most `CLOSED_AT_ONCE`; return them, longest idle first."""
    is_open = sessions.c.status == SessionStatus.OPEN.value
    return _close_idle(conn, is_open, idle_before, SessionStatus.EXPIRED)


UNNAMED_WITH_REWARD = sa.and_(
    groups.OPEN_WITH_REWARD,
    sessions.c.group_id.is_(None),
    sa.exists().where(turns.c.session_pk == sessions.c.session_pk, turns.c.inferred_by.is_not(None)),
)
"""The condition for an open single session that no call names, and that has a reward."""
REWARDED_IDLE = datetime.timedelta(minutes=10)
"""Such a session ends after so long without activity: its client may know of no session to end."""


def end_rewarded_sessions(conn: sa.Connection, idle_before: datetime.datetime) -> list[SessionKey]:
    """End open single sessions that no call names, that have a reward, and without activity since then.

    The limit and the result are those of `expire_idle_sessions`.
    """
    return _close_idle(conn, UNNAMED_WITH_REWARD, idle_before, SessionStatus.ENDED)


def _close_idle(
    conn: sa.Connection, wanted: sa.ColumnElement[bool], idle_before: datetime.datetime, status: SessionStatus
) -> list[SessionKey]:
    idle = conn.execute(
        sa.select(*(sessions.c[name] for name in LockedSession._fields))
        .where(wanted, sessions.c.last_active_at < to_micros(idle_before))
        .order_by(sessions.c.last_active_at)
        .limit(CLOSED_AT_ONCE)
        .with_for_update(skip_locked=True)
    ).all()
    if idle:
        _close(conn, idle, status)
    return [(row.tenant, row.session_id) for row in idle]


def change_session(conn: sa.Connection, wanted: Session, given: Collection[str]) -> Session:
    """Apply the given fields of a session to the stored one of this tenant and id; return it.

    Raises:
        Conflict: one of the fields can no longer change.
    """
    row = session_row(conn, wanted.tenant, wanted.session_id, lock=True)
    stored = rows.SESSIONS.record(row)
    changes = {name: getattr(wanted, name) for name in given if getattr(wanted, name) != getattr(stored, name)}
    if not changes:
        return read_session(conn, wanted.tenant, wanted.session_id)
    if stored.status is not SessionStatus.OPEN:
        _reject_changes(changes.keys() - {"metadata", "user_id"}, stored, f"it is {stored.status.value}")
    _reject_changes(changes.keys() & {"train", "record"}, stored, "what is not to be trained stays so")
    values = rows.SESSIONS.values(changes)
    if _GROUPING & changes.keys():
        values["group_pk"] = _regroup(conn, row.group_pk, stored, dataclasses.replace(stored, **changes))
    conn.execute(sa.update(sessions).where(sessions.c.session_pk == row.session_pk).values(**values))
    if values.get("group_pk", row.group_pk) != row.group_pk:
        groups.leave(conn, [row.group_pk])
    if "user_id" in changes:
        for follow in extensions.after_change:
            follow(conn, dataclasses.replace(stored, **changes))
    return read_session(conn, wanted.tenant, wanted.session_id)


def _regroup(conn: sa.Connection, group_pk: int | None, stored: Session, changed: Session) -> int | None:
    if stored.group_id is not None and changed.group_id != stored.group_id:
        _reject_changes({"group_id"}, stored, f"it is in group {stored.group_id!r}")
    if changed.group_size is not None and changed.group_id is None:
        _reject_changes({"group_size"}, stored, "it has no group_id")
    if changed.split is Split.EVAL or not changed.train:
        return None
    if group_pk is None or changed.group_id != stored.group_id:
        return groups.join(conn, changed)
    if changed.group_size is not None:
        groups.set_size(conn, group_pk, changed)
    return group_pk


def _reject_changes(fields: Collection[str], session: Session, reason: str) -> None:
    if fields:
        names = ", ".join(f"`{name}`" for name in sorted(fields))
        raise Conflict(
            f"session {session.session_id!r} exists and its {names} can no longer change: {reason}; create another",
            param=min(fields),
        )


def read_session(conn: sa.Connection, tenant: str, session_id: str) -> Session:
    return read_session_with_rewards(conn, tenant, session_id)[0]


def read_session_with_rewards(conn: sa.Connection, tenant: str, session_id: str) -> tuple[Session, list[Reward]]:
    """Return a session, and the reward lines for all of it, not for a step or turn, in order of arrival."""
    ((found, lines, _),) = sessions_with_lines(conn, [session_row(conn, tenant, session_id)])
    return found, [line for line in lines if credit.is_for_session(line)]


def list_sessions(
    conn: sa.Connection,
    wanted: SessionFilter,
    *,
    limit: int = 100,
    after: str | None = None,
    max_bytes: int | None = None,
) -> tuple[list[Session], bool]:
    """Return the sessions that follow the session `after`, newest first, and whether there are more.

    With `max_bytes` a page may end before its limit.
    """
    page, has_more = session_rows(conn, wanted, limit=limit, after=after, max_bytes=max_bytes)
    return sessions_from_rows(conn, page), has_more


def sessions_from_rows(conn: sa.Connection, found: Sequence[rows.StoredRow]) -> list[Session]:
    return [session for session, _, _ in sessions_with_lines(conn, found)]


def sessions_with_lines(
    conn: sa.Connection, found: Sequence[rows.StoredRow]
) -> Iterator[tuple[Session, list[Reward], Updates]]:
    lines = rewards_of(conn, [row.session_pk for row in found if row.num_rewards > 0])
    updates_of = trained_in(conn, [row.session_pk for row in found if row.group_pk is not None])
    for row in found:
        own, updates = lines.get(row.session_pk, []), updates_of.get(row.session_pk, ())
        session = rows.SESSIONS.record(
            row,
            reward=credit.session_reward(own, Credit(row.credit)),
            trained_in=tuple(update for update, _ in updates),
        )
        yield session, own, updates
