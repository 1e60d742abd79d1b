"""Forks: sessions that begin with copies of another session's turns, and go on from there with the same tokens.

A copy keeps its tokens, messages and digests, so the next call extends it as it would extend the original. It is not
trained, and not counted as a sampled turn: its outcome is `untrainable` with the reason `forked`.
"""

from __future__ import annotations

import dataclasses
from hashlib import blake2b

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store import ledger, queries
from turnwise.store.session_records import turn_path
from turnwise.types import FORKED, Outcome, Session, Turn


def fork_session(
    conn: sa.Connection, session: Session, turn_id: str, *, before: bool, is_sampled_here: bool = False
) -> tuple[Session, list[Turn]]:
    """Create a session that begins with copies of a turn and its ancestors; idempotent by the new session's id.

    A session that exists and holds no copy of the turn's root is another one, and stays as it is.

    Args:
        conn: A transaction of `Database.write`.
        session: The new session.
        turn_id: The turn, of the new session's tenant.
        before: Leave the turn itself out, so that its prompt can be sampled again.
        is_sampled_here: The turn itself keeps its outcome, so that it is trained in the new session.

    Returns:
        The stored session and the copies.

    Raises:
        NotFound: no such turn.
        Conflict: the session's group takes no more sessions, or the session exists and is no fork of the turn.
    """
    path = turn_path(conn, session.tenant, turn_id)[: -1 if before else None]
    stored, is_new = ledger.create_session(conn, session)
    names = {turn.turn_id: _copy_id(session, turn.turn_id) for turn in path}
    if path and not is_new and queries.session_of_turn(conn, session.tenant, names[path[0].turn_id]) is None:
        raise Conflict(
            f"session {session.session_id!r} exists and is no fork of turn {turn_id!r}; choose another session_id",
            param="session_id",
        )
    sampled_here = turn_id if is_sampled_here else None
    copies = [
        dataclasses.replace(
            turn,
            turn_id=names[turn.turn_id],
            session_id=session.session_id,
            parent_turn_id=names.get(turn.parent_turn_id or ""),
            chain_id=names[path[0].turn_id],
            seq=-1,
            outcome=turn.outcome if turn.turn_id == sampled_here else Outcome.UNTRAINABLE,
            reason=turn.reason if turn.turn_id == sampled_here else FORKED,
            request_key=None,
            request_digest=None,
            inferred_by=None,
            digest=None,
        )
        for turn in path
    ]
    if not copies:
        return stored, []
    placed = ledger.append_turns(conn, copies)
    return queries.session(conn, session.tenant, session.session_id), placed


def _copy_id(session: Session, turn_id: str) -> str:
    """Return the same id for the same copy, so that a repeated fork stores nothing twice."""
    named = "\0".join((session.tenant, session.session_id, turn_id))
    return f"chatcmpl-{blake2b(named.encode(), digest_size=16).hexdigest()}"
