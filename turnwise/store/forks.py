"""Forks: sessions that begin with copies of another session's turns, and go on from there with the same tokens.

A copy keeps its tokens, messages and digests, so the next call extends it as it would extend the original. It is not
trained, and not counted as a sampled turn: its outcome is `untrainable` with the reason `forked`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from hashlib import blake2b

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store import ledger, lineage, pages, queries
from turnwise.types import FORKED, Outcome, Session, Turn

SLICE_TURNS = 20
SLICE_BYTES = 2 * 2**20
"""Most turns, and most bytes of them, that one transaction copies; the first one may be larger."""


def fork_session(
    conn: sa.Connection, session: Session, turn_id: str, *, before: bool, is_sampled_here: bool = False
) -> tuple[Session, bool]:
    """Create a session that begins with copies of a turn and its ancestors, and make some of these copies.

    Call it until the copies are complete: a transaction that copied them all would keep other writers waiting. Each
    copy is made once. A session that exists and holds no copy of the turn's root is another one, and stays as it is.

    Args:
        conn: A transaction of `Database.write`.
        session: The new session.
        turn_id: The turn, of the new session's tenant.
        before: Leave the turn itself out, so that its prompt can be sampled again.
        is_sampled_here: The turn itself keeps its outcome, so that it is trained in the new session.

    Returns:
        The stored session, and whether all copies are made.

    Raises:
        NotFound: no such turn.
        Conflict: the session's group takes no more sessions, or the session exists and is no fork of the turn.
    """
    session_pk = queries.session_pk_of_turn(conn, turn_id, session.tenant)
    names = {each: _copy_id(session, each) for each in lineage.path_ids(conn, session_pk, turn_id)}
    if before:
        del names[turn_id]
    stored, is_new = ledger.create_session(conn, session)
    copied = {} if is_new else queries.sessions_of_turns(conn, session.tenant, names.values())
    left = [each for each in names if names[each] not in copied]
    if len(left) == len(names) and names and not is_new:
        raise Conflict(
            f"session {session.session_id!r} exists and is no fork of turn {turn_id!r}; choose another session_id",
            param="session_id",
        )
    some = _first_slice(conn, left)
    if some:
        sampled_here = turn_id if is_sampled_here else None
        ledger.append_turns(conn, [_copy(turn, session, names, sampled_here) for turn in some])
        stored = queries.session(conn, session.tenant, session.session_id)
    return stored, len(some) == len(left)


def _first_slice(conn: sa.Connection, turn_ids: list[str]) -> list[Turn]:
    """Return the first of these turns of a path, as many as one transaction copies."""
    sizes = lineage.sizes_of(conn, turn_ids[:SLICE_TURNS])
    num_turns, _ = pages.num_fitting((sizes[each] for each in turn_ids[:SLICE_TURNS]), SLICE_TURNS, SLICE_BYTES)
    return [lineage.turn_by_id(conn, each) for each in turn_ids[:num_turns]]


def _copy(turn: Turn, session: Session, names: Mapping[str, str], sampled_here: str | None) -> Turn:
    is_sampled_here = turn.turn_id == sampled_here
    return dataclasses.replace(
        turn,
        turn_id=names[turn.turn_id],
        session_id=session.session_id,
        parent_turn_id=names.get(turn.parent_turn_id or ""),
        chain_id=next(iter(names.values())),
        seq=-1,
        outcome=turn.outcome if is_sampled_here else Outcome.UNTRAINABLE,
        reason=turn.reason if is_sampled_here else FORKED,
        request_key=None,
        request_digest=None,
        inferred_by=None,
        digest=None,
    )


def _copy_id(session: Session, turn_id: str) -> str:
    """Return the same id for the same copy, so that a repeated fork stores nothing twice."""
    named = "\0".join((session.tenant, session.session_id, turn_id))
    return f"chatcmpl-{blake2b(named.encode(), digest_size=16).hexdigest()}"
