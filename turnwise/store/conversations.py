"""Stored conversations that a call is compared with, and the tokens that it extends."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import sqlalchemy as sa

from turnwise.store import rows
from turnwise.store.schema import sessions, turns
from turnwise.store.selection import is_session
from turnwise.store.turns import path_to
from turnwise.types import Outcome, TokenIds, Turn

_ADDED_COLUMNS = [
    sa.literal(b"").label(column.name) if column.name in ("prompt_delta", "logprobs") else column for column in turns.c
]


def unknown_turns(
    conn: sa.Connection, tenant: str, session_id: str, *, first: int, known: Container[str]
) -> tuple[list[Turn], int]:
    """Return the turns of a session whose ids are not known, in order, without prompt ids and logprobs.

    Each has the messages that it adds to its parent's. The second value is the `seq` to pass as `first` next time.
    """
    of_session = is_session(tenant, session_id)
    listed = conn.execute(
        sa.select(turns.c.turn_id, turns.c.seq)
        .join_from(turns, sessions)
        .where(*of_session, turns.c.seq >= first, turns.c.outcome != Outcome.ERROR.value)
        .order_by(turns.c.seq)
    ).all()
    unknown = [row.seq for row in listed if row.turn_id not in known]
    if not unknown:
        return [], listed[-1].seq + 1 if listed else first
    found = conn.execute(
        sa.select(*_ADDED_COLUMNS, sessions.c.session_id, sessions.c.tenant)
        .join_from(turns, sessions)
        .where(*of_session, turns.c.seq.between(unknown[0], unknown[-1]))
        .order_by(turns.c.seq)
    )
    wanted = set(unknown)
    return [rows.TURNS.record(row) for row in found if row.seq in wanted], listed[-1].seq + 1


def newest_generation(conn: sa.Connection, tenant: str, prefix: str) -> int:
    """Return the highest number of the sessions `PREFIX2`, `PREFIX3` and so on that continue an id; 1 without any."""
    numbers = sa.select(sa.literal(1).label("number")).cte("numbers", recursive=True)
    following = sa.literal(prefix) + sa.cast(numbers.c.number + 1, sa.Text)
    is_stored = sa.exists().where(sessions.c.tenant == tenant, sessions.c.session_id == following)
    numbers = numbers.union_all(sa.select(numbers.c.number + 1).where(is_stored))
    return int(conn.execute(sa.select(sa.func.max(numbers.c.number))).scalar_one())


def full_tokens(conn: sa.Connection, turn_id: str) -> TokenIds | None:
    """Return the prompt and sampled ids of a turn; None if it is stored without them."""
    path = path_to(conn, turn_id, turns.c.prompt_length, turns.c.prompt_delta, turns.c.token_ids)
    if not path[-1].prompt_length and not path[-1].token_ids:
        return None
    return np.concatenate([rows.ids_from_blob(blob) for row in path for blob in row[1:]])
