"""Forks: sessions that begin with copies of another session's turns, and go on from there with the same tokens.

A copy keeps its tokens, messages and digests, so the next call extends it as it would extend the original. It is not
trained, and not counted as a sampled turn: its outcome is `untrainable` with the reason `forked`.

Turns are copied, not referred to: then each session has all of its tokens, so that training, exports, copies and
deletions read and write one session at a time, and the deletion of one changes no other. The path is read before the
first transaction, and each transaction copies a slice of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa

from turnwise.errors import Conflict, NotFound
from turnwise.features.copies import FORKED, session_copies
from turnwise.store import extensions
from turnwise.store.schema import turns
from turnwise.store.selection import lock_sessions, sessions_of_turns
from turnwise.store.sessions import create_session, read_session
from turnwise.store.statements import insert_rows
from turnwise.store.turns import append_turns, fitting, path_to, turns_where
from turnwise.types import Outcome, Session, Turn

SLICE_TURNS = 20
SLICE_BYTES = 2 * 2**20
"""Most turns, and most bytes of them, that one transaction copies; the first one may be larger."""


def read_path(conn: sa.Connection, session: Session, turn_id: str, *, before: bool) -> tuple[list[str], int]:
    """Return the turns to copy, in order, and how many of them an earlier attempt has copied.

    With `before` the turn itself is left out, so that its prompt can be sampled again.
    """
    path = [row.turn_id for row in path_to(conn, turn_id, turns.c.turn_id, tenant=session.tenant)]
    if before:
        path.pop()
    copied = sessions_of_turns(conn, session.tenant, [copy_id(session, each) for each in path])
    return path, len(copied)


def copy_turns(
    conn: sa.Connection, session: Session, root_id: str | None, turn_ids: Sequence[str]
) -> tuple[Session, int]:
    """Create the new session if it is not stored, and copy the first of these turns, each once; return it and how many.

    A session that exists and holds no copy of the path's first turn, `root_id`, is another one, and stays as it is.
    At most `SLICE_TURNS` turns are given.

    Raises:
        NotFound: a turn was deleted.
        Conflict: the session's group takes no more sessions, or the session exists and is no fork of the path.
    """
    stored, is_new = create_session(conn, session)
    if root_id is not None and not is_new and not sessions_of_turns(conn, session.tenant, [copy_id(session, root_id)]):
        raise Conflict(
            f"session {session.session_id!r} exists and does not begin with a copy of turn {root_id!r}; choose "
            "another session_id",
            param="session_id",
        )
    some = fitting(conn, turn_ids, SLICE_BYTES)
    if some:
        present = sessions_of_turns(conn, session.tenant, some)
        if is_new:
            sources = set(present.values())
            lock_sessions(conn, {(session.tenant, each) for each in sources})
            note_copy(conn, session, sources, FORKED)
        if missing := [each for each in some if each not in present]:
            raise NotFound(f"there is no turn {missing[0]!r} any more; its session was deleted", param="turn_id")
        copies = [_fork(turns_where(conn, turns.c.turn_id == each)[0], session) for each in some]
        append_turns(conn, copies)
        stored = read_session(conn, session.tenant, session.session_id)
    return stored, len(some)


def _fork(turn: Turn, session: Session) -> Turn:
    own_id, parent_id = copy_id(session, turn.turn_id), turn.parent_turn_id
    return copy_of(
        turn,
        session,
        turn_id=own_id,
        parent_turn_id=None if parent_id is None else copy_id(session, parent_id),
        chain_id=own_id,  # the store sets the chain of a turn that extends another
        outcome=Outcome.UNTRAINABLE,
        reason=FORKED,
    )


def copy_of(turn: Turn, session: Session, **changes: Any) -> Turn:
    """Return a turn as another session stores it, which no retry and no call without a session's name finds.

    It counts as sampled by the other session's policy, as all turns of its chain.
    """
    unnamed: dict[str, Any] = dict.fromkeys(("request_key", "request_digest", "inferred_by", "digest"))
    own: dict[str, Any] = {"session_id": session.session_id, "policy_id": session.policy_id, "seq": -1}
    return dataclasses.replace(turn, **own | unnamed | changes)


def note_copy(conn: sa.Connection, session: Session, source_ids: Collection[str], made_by: str) -> None:
    """Record that a new session holds copies of turns of others, by which a deletion finds it; mark it as they are."""
    made = {"tenant": session.tenant, "made_by": made_by}
    (session_pk,) = (row.session_pk for row in lock_sessions(conn, [(session.tenant, session.session_id)]))
    insert_rows(
        conn, session_copies, [{"session_pk": session_pk, "source_id": each, **made} for each in sorted(source_ids)]
    )
    for follow in extensions.after_copy:
        follow(conn, (session.tenant, session.session_id), source_ids)


def copy_id(session: Session, turn_id: str) -> str:
    named = "\0".join((session.tenant, session.session_id, turn_id))
    return f"chatcmpl-{blake2b(named.encode(), digest_size=16).hexdigest()}"
