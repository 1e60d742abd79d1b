"""Writes of running agents: sessions, turns and rewards, and their effect on groups.

Every function runs in the caller's transaction, so the proxy commits all waiting turns together, and ending a session
with a reward is one commit. A session is *finished* when it is over (ended or expired) and has a reward. The write
that finishes a session counts it in its group, and the write that finishes the last session makes the group ready.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from turnwise.errors import Conflict, InvalidRequest, NotFound, TurnwiseError
from turnwise.store import arms, groups, idempotency, new_turns, queries, rows
from turnwise.store.queries import LockedSession, lock_sessions
from turnwise.store.rows import to_micros
from turnwise.store.statements import fetch_rows, insert_new_rows, insert_rows, is_among
from turnwise.store.tables import rewards, sessions, turns
from turnwise.types import MAX_REWARD, Reward, Session, SessionKey, SessionStatus, Split, Turn, utc_now

CLOSED_AT_ONCE = 500
"""Most idle sessions that one transaction closes."""
Created = tuple[Session, bool] | TurnwiseError
"""The stored session and whether it was created; or the error that rejects it."""


def create_session(conn: sa.Connection, session: Session) -> tuple[Session, bool]:
    """Create a session and add it to its group; idempotent by tenant and session id.

    Returns:
        The stored session, and whether this call created it.

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

    Args:
        conn: A transaction of `Database.write`.
        wanted: Sessions as they are stored if they are new.

    Returns:
        The result of each session.
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
                result = queries.session(conn, session.tenant, session.session_id), False
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
    assigned = arms.assign(conn, [wanted[key] for key in sorted(wanted.keys() - stored - results.keys())])
    trained = [session for session in assigned if session.split is Split.TRAIN]
    group_pks = groups.create(conn, [session for session in trained if session.group_id is None])
    joining = [session for session in trained if _key(session) not in group_pks]
    for session in sorted(joining, key=lambda each: (each.tenant, each.group_id or each.session_id)):
        try:
            group_pks[_key(session)] = groups.join(conn, session)
        except Conflict as error:
            results[_key(session)] = error
    new = {_key(session): session for session in assigned if _key(session) not in results}
    new_rows = [rows.session_row(session, group_pks.get(key)) for key, session in new.items()]
    created = set(insert_new_rows(conn, sessions, new_rows, "tenant", "session_id"))
    # Other writers may have created some of the sessions meanwhile.
    groups.leave(conn, [pk for key, pk in group_pks.items() if key not in created])
    return results | {
        key: (dataclasses.replace(session, last_active_at=session.created_at), True)
        for key, session in new.items()
        if key in created
    }


def append_turns(conn: sa.Connection, batch: Sequence[Turn]) -> None:
    """Store turns as `new_turns.append` does."""
    new_turns.append(conn, list(map(rows.TURNS.row, batch)))


def end_session(
    conn: sa.Connection, tenant: str, session_id: str, reason: str | None = None, *, reward: Reward | None = None
) -> Session:
    """End a session, with an optional last reward; ending it again changes only its rewards.

    Raises:
        NotFound: no such session.
        Conflict: it has expired.
    """
    if reward is not None:
        add_rewards(conn, [reward])
    row = queries.session_row(conn, tenant, session_id, lock=True)
    if row.status == SessionStatus.EXPIRED:
        raise Conflict(f"session {session_id!r} has expired; create a new one", code="session_expired")
    if row.status == SessionStatus.OPEN:
        _close(conn, [row], SessionStatus.ENDED, reason)
    return queries.session(conn, tenant, session_id)


def _close(
    conn: sa.Connection, found: Sequence[rows.StoredRow], status: SessionStatus, reason: str | None = None
) -> None:
    """Set the status of open sessions that are over now; those with a reward are finished."""
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


def end_rewarded_sessions(conn: sa.Connection, idle_before: datetime.datetime) -> list[SessionKey]:
    """End open single sessions that no call names, that have a reward, and without activity since then.

    Their clients may know of no session to end. The limit and the result are those of `expire_idle_sessions`.
    """
    is_unnamed = sa.exists().where(turns.c.session_pk == sessions.c.session_pk, turns.c.inferred_by.is_not(None))
    wanted = sa.and_(groups.OPEN_WITH_REWARD, sessions.c.group_id.is_(None), is_unnamed)
    return _close_idle(conn, wanted, idle_before, SessionStatus.ENDED)


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


def add_rewards(
    conn: sa.Connection,
    lines: Sequence[Reward],
    *,
    idempotency_key: str | None = None,
    body_digest: bytes = b"",
    retrain: bool = False,
) -> list[int]:
    """Append all reward lines in one transaction.

    Args:
        conn: A transaction of `Database.write`.
        lines: Lines of one tenant. A line with a turn id may have an empty session id.
        idempotency_key: A replay with the same key and sessions gets the first answer and writes nothing.
        body_digest: Digest of the request's body; it distinguishes a replay from another body with the same key.
        retrain: Whether trained groups become ready again, to be trained with the new rewards.

    Returns:
        The number of turns that each line applies to.

    Raises:
        NotFound: an unknown session, turn or step.
        InvalidRequest: a value is not finite, or a line has both a turn and a step.
        Conflict: the key was used with another body.
    """
    if not lines:
        return []
    tenant = lines[0].tenant
    session_ids = _checked_targets(conn, tenant, lines)
    scope = session_ids[0] if len(set(session_ids)) == 1 else idempotency.SEVERAL
    if idempotency_key is not None:
        answer = idempotency.claim_key(conn, tenant, scope, idempotency_key, body_digest)
        if answer is not None:
            return answer
    locked = lock_sessions(conn, {(tenant, session_id) for session_id in session_ids})
    by_id = {row.session_id: row for row in locked}
    targets = [by_id[session_id] for session_id in session_ids]
    reached = _reached(conn, lines, targets)
    reward_rows = [rows.reward_row(line, row.session_pk) for line, row in zip(lines, targets, strict=True)]
    insert_rows(conn, rewards, reward_rows)
    _count_rewards(conn, locked, targets, to_micros(max(line.created_at for line in lines)))
    if retrain:
        groups.reopen(conn, {row.group_pk for row in locked if row.group_pk is not None})
    if idempotency_key is not None:
        idempotency.keep_answer(conn, tenant, scope, idempotency_key, reached)
    return reached


def _checked_targets(conn: sa.Connection, tenant: str, lines: Sequence[Reward]) -> list[str]:
    """Return the session id of each line's target; one statement reads all of them."""
    for line in lines:
        if not abs(line.value) <= MAX_REWARD:
            raise InvalidRequest(
                f"reward value {line.value!r} is not a number from {-MAX_REWARD:g} to {MAX_REWARD:g}; scale it down",
                param="value",
            )
        if line.turn_id is not None and line.step is not None:
            raise InvalidRequest(
                f"a reward is for turn {line.turn_id!r} or for step {line.step!r}, not both", param="step"
            )
    found = queries.sessions_of_turns(conn, tenant, {line.turn_id for line in lines if line.turn_id is not None})
    return [
        line.session_id if line.turn_id is None else queries.holder(found, line.turn_id, line.session_id)
        for line in lines
    ]


def _reached(conn: sa.Connection, lines: Sequence[Reward], targets: Sequence[LockedSession]) -> list[int]:
    """Return the number of turns that each line applies to; one statement counts the turns of all steps."""
    pks = {row.session_pk for line, row in zip(lines, targets, strict=True) if line.step is not None}
    steps = {line.step for line in lines if line.step is not None}
    turns_in: dict[tuple[int, int], int] = {}
    if pks:
        counted = conn.execute(
            sa.select(turns.c.session_pk, turns.c.step, sa.func.count().label("number"))
            .where(is_among(conn.dialect, turns.c.session_pk, pks), is_among(conn.dialect, turns.c.step, steps))
            .group_by(turns.c.session_pk, turns.c.step)
        )
        turns_in = {(row.session_pk, row.step): row.number for row in counted}
    reached = []
    for line, row in zip(lines, targets, strict=True):
        if line.step is None:
            reached.append(1 if line.turn_id is not None else row.num_turns)
            continue
        if (row.session_pk, line.step) not in turns_in:
            raise NotFound(f"session {line.session_id!r} has no turn in step {line.step!r}", param="step")
        reached.append(turns_in[row.session_pk, line.step])
    return reached


def _count_rewards(
    conn: sa.Connection, locked: Sequence[LockedSession], targets: Iterable[LockedSession], instant: int
) -> None:
    """Count new lines in their sessions; finish the sessions that are over and had no lines before."""
    new_lines = collections.Counter(row.session_pk for row in targets)
    conn.execute(
        sa.update(sessions)
        .where(sessions.c.session_pk == sa.bindparam("pk"))
        .values(num_rewards=sessions.c.num_rewards + sa.bindparam("new_lines"), last_active_at=instant),
        [{"pk": row.session_pk, "new_lines": new_lines[row.session_pk]} for row in locked],
    )
    groups.finish(conn, [row for row in locked if row.status != SessionStatus.OPEN and row.num_rewards == 0])
