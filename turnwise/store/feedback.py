"""Feedback of people: what they said is stored as they said it, and what can be trained of it follows from it.

A thumb or a rating is also a line of the reward ledger. A demonstration makes a group of sessions like those of an
import: one with the better reply and a reward of 1, and for each reply that it was preferred to one with a reward of 0.
So SFT imitates the better reply and DPO trains the pair, and reinforcement learning leaves the group alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

import sqlalchemy as sa

from turnwise.chains import IMPORTED
from turnwise.errors import InvalidRequest
from turnwise.store import forks, retention, rows
from turnwise.store.rewards import add_rewards, claim_key
from turnwise.store.schema import feedback, sessions
from turnwise.store.selection import SessionFilter, session_row
from turnwise.store.sessions import end_session
from turnwise.store.statements import insert_rows
from turnwise.store.turns import append_turns, turn_by_id
from turnwise.types import FEEDBACK, IMPORT, Feedback, FeedbackKind, Outcome, Reward, Session, TokenIds, Turn

MAX_FEEDBACK = 1000
"""Most feedback of one session."""
RATINGS = (FeedbackKind.BOOLEAN, FeedbackKind.FLOAT)
CORRECTION = "correction"
"""Name of the reward of a comment or an edited reply, where `feedback_rewards` gives them one."""
NO_POLICY = -1
"""Policy version of a reply that no policy sampled."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A session of a demonstration's group."""

    session: Session
    turn_id: str
    """The turn whose prompt it has, and unless the reply is written its reply."""
    reward: float
    written: str | None = None
    """The reply as a person wrote it; None for one that was sampled."""
    token_ids: TokenIds | None = None
    """The written reply's tokens."""


def group_of(given: Feedback) -> str:
    """Return the id of a demonstration's group: the same for the same demonstration, so that a retry finds it."""
    named = (given.tenant, given.turn_id, given.name, rows.dump(given.content))
    return f"{FEEDBACK}-{blake2b(chr(0).join(named).encode(), digest_size=16).hexdigest()}"


def member(given: Feedback, original: Session, number: int, size: int) -> Session:
    """Return a session of a demonstration's group; number 0 has the better reply."""
    return Session(
        session_id=f"{given.group_id}-{number}",
        tenant=given.tenant,
        task_id=original.task_id,
        run=number,
        group_id=given.group_id,
        group_size=size,
        split=original.split,
        policy_id=original.policy_id,
        user_id=original.user_id,
        metadata={FEEDBACK: {"session_id": given.session_id, "turn_id": given.turn_id}},
        opened_by=IMPORT,
    )


def add(
    conn: sa.Connection,
    given: Feedback,
    *,
    reward: float | None = None,
    group: Sequence[Member] = (),
    idempotency_key: str | None = None,
    body_digest: bytes = b"",
    retrain: bool = False,
) -> None:
    """Store feedback in place of an earlier one of the same target, kind and name.

    Args:
        conn: A transaction of `Database.write`.
        given: The feedback.
        reward: Its value in the reward ledger; None writes no reward.
        group: A demonstration's sessions, which exist already and hold copies of the original's turns.
        idempotency_key: A replay with the same key and session writes nothing.
        body_digest: Digest of the request's body, as for rewards.
        retrain: Whether a trained session becomes ready again, to be trained with the new reward.

    Raises:
        NotFound: no such session or turn.
        InvalidRequest: the session has `MAX_FEEDBACK` others.
        Conflict: the key was used with another body.
    """
    session_pk = session_row(conn, given.tenant, given.session_id, lock=True).session_pk
    if idempotency_key is not None:
        known = claim_key(conn, given.tenant, given.session_id, idempotency_key, body_digest)
        if known is not None:
            return
    earlier = _replaced(conn, given, session_pk)
    insert_rows(conn, feedback, [rows.FEEDBACK.row(given, session_pk=session_pk)])
    if reward is not None:
        line = Reward(
            session_id=given.session_id,
            tenant=given.tenant,
            turn_id=given.turn_id or None,
            value=reward,
            name=given.name if given.kind in RATINGS else CORRECTION,
            source=given.source or FEEDBACK,
            written_by=given.written_by,
        )
        add_rewards(conn, [line], retrain=retrain)
    if earlier is not None and earlier != given.group_id:
        retention.delete_sessions(conn, SessionFilter(tenant=given.tenant, group_id=earlier))
    if earlier != given.group_id:
        for one in group:
            _finish(conn, one)


def feedback_of(conn: sa.Connection, tenant: str, session_id: str) -> list[Feedback]:
    """Return the feedback of a session, oldest first.

    Raises:
        NotFound: no such session.
    """
    session_pk = session_row(conn, tenant, session_id).session_pk
    found = sa.select(feedback, sessions.c.session_id, sessions.c.tenant).join_from(feedback, sessions)
    own = found.where(feedback.c.session_pk == session_pk).order_by(feedback.c.created_at)
    return [rows.FEEDBACK.record(row) for row in conn.execute(own)]


def _replaced(conn: sa.Connection, given: Feedback, session_pk: int) -> str | None:
    """Remove the feedback that this one replaces; return the group that it made."""
    own = feedback.c.session_pk == session_pk
    same = sa.and_(
        own,
        feedback.c.turn_id == given.turn_id,
        feedback.c.kind == given.kind.value,
        feedback.c.name == given.name,
    )
    earlier = conn.execute(sa.delete(feedback).where(same).returning(feedback.c.group_id)).scalar_one_or_none()
    if conn.execute(sa.select(sa.func.count()).where(own)).scalar_one() >= MAX_FEEDBACK:
        raise InvalidRequest(
            f"session {given.session_id!r} has {MAX_FEEDBACK} other feedback, which is the limit; replace one by its "
            "target, kind and name"
        )
    return earlier


def _finish(conn: sa.Connection, one: Member) -> None:
    """Complete a session of a demonstration's group and end it with its reward."""
    if one.written is not None and one.token_ids is not None:
        append_turns(conn, [_written_turn(conn, one, one.written, one.token_ids)])
    session = one.session
    reward = Reward(session_id=session.session_id, tenant=session.tenant, value=one.reward, source=FEEDBACK)
    end_session(conn, session.tenant, session.session_id, FEEDBACK, reward=reward)


def _written_turn(conn: sa.Connection, one: Member, text: str, token_ids: TokenIds) -> Turn:
    """Return the turn of a written reply: the sampled one's prompt, another reply, no policy."""
    sampled = turn_by_id(conn, one.turn_id)
    turn_id = f"{one.session.session_id}-t0"
    parent = None if sampled.parent_turn_id is None else forks.copy_id(one.session, sampled.parent_turn_id)
    return Turn(
        turn_id=turn_id,
        session_id=one.session.session_id,
        tenant=one.session.tenant,
        parent_turn_id=parent,
        chain_id=parent or turn_id,
        dialect=sampled.dialect,
        model=sampled.model,
        messages=sampled.messages,
        tools=sampled.tools,
        response={"role": "assistant", "content": text},
        prompt_delta=sampled.prompt_delta,
        prompt_length=sampled.prompt_length,
        token_ids=token_ids,
        finish_reason="stop",
        outcome=Outcome.UNTRAINABLE,
        reason=IMPORTED,
        policy_version_first=NO_POLICY,
        policy_version_last=NO_POLICY,
    )
