"""Rewards: appended lines, each request once by its `Idempotency-Key`.

The write that gives a session that is over its first reward finishes it, and counts it in its group. A key belongs to a
tenant and to the session that the request rewards: keys are easy to guess, and a request for one session must not use
up a key of another one. Requests for several sessions have keys of their own.
"""

from __future__ import annotations

import collections
import datetime
import json
from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from turnwise.errors import Conflict, InvalidRequest, NotFound
from turnwise.store import groups, rows
from turnwise.store.rows import StoredRow, dump, to_micros
from turnwise.store.schema import idempotency, rewards, sessions, turns
from turnwise.store.selection import LockedSession, holder, lock_sessions, sessions_of_turns
from turnwise.store.statements import delete_some, insert_ignoring, insert_rows, is_among
from turnwise.types import MAX_REWARD, Reward, SessionStatus, utc_now

_SELECT_REWARDS = sa.select(*rewards.c, sessions.c.session_id, sessions.c.tenant).join_from(rewards, sessions)
SEVERAL = ""


def add_rewards(
    conn: sa.Connection,
    lines: Sequence[Reward],
    *,
    idempotency_key: str | None = None,
    body_digest: bytes = b"",
    retrain: bool = False,
) -> list[int]:
    """Append all reward lines of one tenant; return the number of turns that each line applies to.

    A line with a turn id may have an empty session id. A replay with the same idempotency key and sessions gets the
    first answer and writes nothing; `body_digest` distinguishes it from another body with the same key. With
    `retrain` trained groups become ready again, to be trained with the new rewards.

    Raises:
        InvalidRequest: a value is not finite, or a line has both a turn and a step.
        Conflict: the key was used with another body.
    """
    if not lines:
        return []
    tenant = lines[0].tenant
    session_ids = _checked_targets(conn, tenant, lines)
    scope = session_ids[0] if len(set(session_ids)) == 1 else SEVERAL
    if idempotency_key is not None:
        answer = claim_key(conn, tenant, scope, idempotency_key, body_digest)
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
        is_claimed = _is_key(tenant, scope, idempotency_key)
        conn.execute(sa.update(idempotency).where(is_claimed).values(answer=dump(reached)))
    return reached


def take_back(
    conn: sa.Connection, session: LockedSession, turn_id: str | None, name: str, *, retrain: bool = False
) -> None:
    """Remove the lines of a name on a session or one of its turns, so that this target is as before the first of them.

    With `retrain` a trained group becomes ready again.
    """
    is_theirs = (rewards.c.session_pk == session.session_pk, rewards.c.name == name, rewards.c.step.is_(None))
    gone = conn.execute(sa.delete(rewards).where(*is_theirs, rewards.c.turn_id.is_not_distinct_from(turn_id))).rowcount
    left = session.num_rewards - gone
    values = {"num_rewards": left, "last_active_at": to_micros(utc_now())}
    conn.execute(sa.update(sessions).where(sessions.c.session_pk == session.session_pk).values(**values))
    if session.group_pk is None or not gone:
        return
    if not left and session.status != SessionStatus.OPEN:
        groups.take_back(conn, session.group_pk)
    if retrain:
        groups.reopen(conn, {session.group_pk})


def _checked_targets(conn: sa.Connection, tenant: str, lines: Sequence[Reward]) -> list[str]:
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
    found = sessions_of_turns(conn, tenant, {line.turn_id for line in lines if line.turn_id is not None})
    return [line.session_id if line.turn_id is None else holder(found, line.turn_id, line.session_id) for line in lines]


def _reached(conn: sa.Connection, lines: Sequence[Reward], targets: Sequence[LockedSession]) -> list[int]:
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
    new_lines = collections.Counter(row.session_pk for row in targets)
    conn.execute(
        sa.update(sessions)
        .where(sessions.c.session_pk == sa.bindparam("pk"))
        .values(num_rewards=sessions.c.num_rewards + sa.bindparam("new_lines"), last_active_at=instant),
        [{"pk": row.session_pk, "new_lines": new_lines[row.session_pk]} for row in locked],
    )
    groups.finish(conn, [row for row in locked if row.status != SessionStatus.OPEN and row.num_rewards == 0])


def rewards_of(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, list[Reward]]:
    found = conn.execute(_SELECT_REWARDS.where(rewards.c.session_pk.in_(session_pks)).order_by(rewards.c.reward_id))
    return rows.by_key(found, "session_pk", rows.REWARDS.record)


def claim_key(conn: sa.Connection, tenant: str, session_id: str, key: str, body_digest: bytes) -> list[int] | None:
    """Claim an idempotency key, or return the answer of the request that claimed it first."""
    known = claim(conn, tenant, session_id, key, body_digest, "[]")
    if known is None:
        return None
    if known.body_digest != body_digest:
        raise Conflict(f"idempotency key {key!r} was used with another body; use a new key")
    return [int(reached) for reached in json.loads(known.answer)]


def claim(
    conn: sa.Connection, tenant: str, session_id: str, key: str, body_digest: bytes, answer: str
) -> StoredRow | None:
    row = {"tenant": tenant, "session_id": session_id, "key": key, "body_digest": body_digest, "answer": answer}
    if insert_ignoring(conn, idempotency, row | {"created_at": to_micros(utc_now())}):
        return None
    return conn.execute(sa.select(idempotency).where(_is_key(tenant, session_id, key))).one()


def forget_answers(conn: sa.Connection, before: datetime.datetime) -> int:
    return delete_some(conn, idempotency, idempotency.c.created_at < to_micros(before))


def _is_key(tenant: str, session_id: str, key: str) -> sa.ColumnElement[bool]:
    of_session = sa.and_(idempotency.c.tenant == tenant, idempotency.c.session_id == session_id)
    return sa.and_(of_session, idempotency.c.key == key)
