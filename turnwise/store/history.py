"""Queries of the continuation: stored conversations that a call is compared with, and the tokens that it extends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import sqlalchemy as sa

from turnwise.store import lineage, tables
from turnwise.store.queries import session_pk_of_turn
from turnwise.types import Outcome, SessionStatus, TokenIds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """The data of a turn that a request is compared with to find the turn that it extends."""

    turn_id: str
    parent_turn_id: str | None
    chain_id: str
    seq: int
    outcome: Outcome
    prompt_length: int
    num_sampled: int
    """Number of sampled tokens; with `prompt_length`, the number of tokens that an extension starts with."""
    history_digest: bytes
    messages_digest: bytes
    dialogue_digest: bytes


def history_index(conn: sa.Connection, tenant: str, session_id: str) -> list[HistoryEntry]:
    """Return the entries of a session's turns, in order; empty if there is no such session."""
    found = conn.execute(
        sa.select(
            tables.turns.c.turn_id,
            tables.turns.c.parent_turn_id,
            tables.turns.c.chain_id,
            tables.turns.c.seq,
            tables.turns.c.outcome,
            tables.turns.c.prompt_length,
            sa.func.length(tables.turns.c.token_ids).label("num_sampled_bytes"),
            tables.turns.c.history_digest,
            tables.turns.c.messages_digest,
            tables.turns.c.dialogue_digest,
        )
        .join_from(tables.turns, tables.sessions)
        .where(tables.sessions.c.tenant == tenant, tables.sessions.c.session_id == session_id)
        .order_by(tables.turns.c.seq)
    )
    return [
        HistoryEntry(
            turn_id=row.turn_id,
            parent_turn_id=row.parent_turn_id,
            chain_id=row.chain_id,
            seq=row.seq,
            outcome=Outcome(row.outcome),
            prompt_length=row.prompt_length,
            num_sampled=row.num_sampled_bytes // 4,
            history_digest=row.history_digest,
            messages_digest=row.messages_digest,
            dialogue_digest=row.dialogue_digest,
        )
        for row in found
    ]


def sessions_of_conversation(
    conn: sa.Connection,
    tenant: str,
    key_id: str,
    digests: Sequence[bytes],
    *,
    limit: int,
    by: Literal["history_digest", "dialogue_digest"] = "history_digest",
) -> tuple[bytes, list[str]]:
    """Return the open sessions that contain the longest of these conversations and were inferred for this API key.

    Args:
        conn: A transaction.
        tenant: The key's tenant.
        key_id: The API key.
        digests: The digest of each conversation, longest first.
        limit: Maximum number of sessions; the newest are returned.
        by: The column of turns that the digests are compared with.

    Returns:
        The digest that was found, and the ids of the sessions, oldest first.
    """
    column = tables.turns.c[by]
    found = conn.execute(
        sa.select(column.label("digest"), tables.sessions.c.session_id)
        .distinct()
        .add_columns(tables.sessions.c.session_pk)
        .join_from(tables.turns, tables.sessions)
        .where(
            tables.turns.c.inferred_by == key_id,
            column.in_(digests),
            tables.sessions.c.tenant == tenant,
            tables.sessions.c.status == SessionStatus.OPEN.value,
        )
        .order_by(tables.sessions.c.session_pk)
    ).all()
    for digest in digests:
        session_ids = [str(row.session_id) for row in found if row.digest == digest]
        if session_ids:
            return digest, session_ids[-limit:]
    return b"", []


def full_tokens(conn: sa.Connection, turn_id: str) -> TokenIds:
    """Return a turn's prompt and sampled tokens, rebuilt from its ancestors.

    Raises:
        NotFound: no such turn.
    """
    return lineage.tokens_through(conn, session_pk_of_turn(conn, turn_id), turn_id)
