"""Append turns to their sessions: each is stored exactly once, and gets its place, its chain and its digest.

Turns are rows instead of records, because the proxy's writing process builds no object that is not stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.errors import Conflict, NotFound
from turnwise.store import queries
from turnwise.store.rows import finish_turn
from turnwise.store.statements import execute_many, fetch_rows, insert_rows, mark
from turnwise.store.tables import turns
from turnwise.types import Outcome, SessionKey, SessionStatus, Turn

SESSION_ENDED = "session_ended"
"""Reason of a turn that is untrainable because its session was over."""


TurnRow: TypeAlias = dict[str, Any]
"""The row of a turn to store, from `rows.TURNS.row`."""


def append(conn: sa.Connection, batch: Sequence[TurnRow]) -> list[bool]:
    """Store turns of many sessions, each exactly once by its turn id and by its session and request key.

    A turn of a session that is over is stored as untrainable with the reason `session_ended`.

    Args:
        conn: A transaction of `Database.write`.
        batch: Turns in order of arrival, parents before children. Place, chain, digest and changed outcomes are set.
            A row may have the instant `session_created_at` of the session that its call had found.

    Returns:
        Whether each turn was added; a replay was not, and `stored_turn` returns the turn that is stored.

    Raises:
        NotFound: a session or a parent is not stored, or the session was deleted and there is another one of its name.
        Conflict: another session has a turn with this id.
    """
    locked = queries.lock_sessions(conn, set(map(_session_of, batch)))
    states = {(session.tenant, session.session_id): _SessionState(session) for session in locked}
    session_of_turn, open_chains = _stored_turns(conn, batch)
    stored_keys = _stored_keys(conn, batch, states)
    added: list[bool] = []
    for row in batch:
        state = states[_session_of(row)]
        session_pk = state.stored.session_pk
        if row.get("session_created_at", state.stored.created_at) != state.stored.created_at:
            raise NotFound(f"session {row['session_id']!r} was deleted during the call", param="session_id")
        turn_id, parent_id = row["turn_id"], row["parent_turn_id"]
        added.append(not _is_replay(row, session_pk, session_of_turn, stored_keys))
        if not added[-1]:
            continue
        if parent_id is not None and session_of_turn.get(parent_id) != session_pk:
            raise NotFound(f"turn {turn_id!r} extends {parent_id!r}, which its session does not hold")
        session_of_turn[turn_id] = session_pk
        stored_keys.add((session_pk, row["request_key"]))
        # Of several turns that extend one turn at the same time, the first continues its chain.
        row["chain_id"] = turn_id if parent_id is None else open_chains.pop(parent_id, turn_id)
        open_chains[turn_id] = row["chain_id"]
        state.place(row)
        finish_turn(row)
    new_rows = [row for row, is_added in zip(batch, added, strict=True) if is_added]
    if new_rows:
        insert_rows(conn, turns, new_rows)
        latest = "greatest" if conn.dialect.name == "postgresql" else "max"
        count = _COUNT.format(latest=latest, value=mark(conn.dialect))
        execute_many(conn, count, [state.counts() for state in states.values() if state.num_new])
    return added


def stored_turn(conn: sa.Connection, replay: TurnRow) -> Turn:
    """Return the stored turn of a replay."""
    names = {"turn_id": replay["turn_id"], "request_key": replay["request_key"]}
    stored = queries.stored_turn(conn, *_session_of(replay), **names)
    assert stored is not None
    return stored


def _session_of(row: TurnRow) -> SessionKey:
    return row["tenant"], row["session_id"]


_HAS_CHILD = (
    "EXISTS (SELECT 1 FROM turns AS child WHERE child.session_pk = turns.session_pk AND child.seq > turns.seq "
    "AND child.parent_turn_id = turns.turn_id)"
)
"""Whether a turn extends this one; it reads only later turns of the session."""
_COUNT = (
    "UPDATE sessions SET num_turns = num_turns + {value}, num_chains = num_chains + {value}, "
    "last_active_at = {latest}(last_active_at, {value}) WHERE session_pk = {value}"
)
"""Counts new turns and chains in their session, with the instant of the last activity."""


@dataclasses.dataclass(slots=True)
class _SessionState:
    """A locked session to which turns are appended."""

    stored: queries.LockedSession
    num_new: int = 0
    num_new_chains: int = 0
    last_active_at: int = 0

    def place(self, row: dict[str, Any]) -> None:
        """Set a turn's place in the session."""
        seq = self.stored.num_turns + self.num_new
        self.num_new += 1
        self.num_new_chains += row["chain_id"] == row["turn_id"]
        self.last_active_at = max(self.last_active_at, row["created_at"])
        row["session_pk"], row["seq"] = self.stored.session_pk, seq
        if row["step"] is None:
            row["step"] = seq
        if self.stored.status != SessionStatus.OPEN and row["outcome"] in TRAINABLE_OUTCOMES:
            row["outcome"], row["reason"] = Outcome.UNTRAINABLE.value, SESSION_ENDED

    def counts(self) -> tuple[int, int, int, int]:
        return self.num_new, self.num_new_chains, self.last_active_at, self.stored.session_pk


def _stored_turns(conn: sa.Connection, batch: Sequence[TurnRow]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the session of each turn and parent of the batch that is stored, and the chain of each without a child.

    The parents' sessions are locked.
    """
    ids = {turn_id for row in batch for turn_id in (row["turn_id"], row["parent_turn_id"]) if turn_id is not None}
    found = fetch_rows(conn, turns, ("turn_id", "session_pk", "chain_id", _HAS_CHILD), {"turn_id": list(ids)})
    open_chains = {turn_id: chain_id for turn_id, _, chain_id, has_child in found if not has_child}
    return {turn_id: session_pk for turn_id, session_pk, _, _ in found}, open_chains


def _stored_keys(
    conn: sa.Connection, batch: Sequence[TurnRow], states: dict[SessionKey, _SessionState]
) -> set[tuple[int, str | None]]:
    """Return the stored ones of the batch's request keys, with their sessions."""
    keyed = [row for row in batch if row["request_key"] is not None]
    names = {
        "session_pk": [states[_session_of(row)].stored.session_pk for row in keyed],
        "request_key": [row["request_key"] for row in keyed],
    }
    return set(fetch_rows(conn, turns, tuple(names), names)) if keyed else set()


def _is_replay(
    row: dict[str, Any], session_pk: int, session_of_turn: dict[str, int], stored_keys: set[tuple[int, str | None]]
) -> bool:
    turn_id, request_key = row["turn_id"], row["request_key"]
    holder = session_of_turn.get(turn_id)
    if holder is not None and holder != session_pk:
        raise Conflict(f"turn id {turn_id!r} belongs to another session; ids must be unique")
    return holder is not None or (request_key is not None and (session_pk, request_key) in stored_keys)
