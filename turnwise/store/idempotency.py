"""Stored answers by `Idempotency-Key`: a repeated request gets the first answer and writes nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store.database import to_micros
from turnwise.store.rows import dump
from turnwise.store.statements import insert_ignoring
from turnwise.store.tables import idempotency
from turnwise.types import utc_now


def claim_key(conn: sa.Connection, tenant: str, key: str, body_digest: bytes) -> list[int] | None:
    """Claim an idempotency key, or return the answer of the request that claimed it first.

    Raises:
        Conflict: the key was used with another body.
    """
    row = {"tenant": tenant, "key": key, "body_digest": body_digest, "answer": "[]", "created_at": to_micros(utc_now())}
    if insert_ignoring(conn, idempotency, row):
        return None
    known = conn.execute(sa.select(idempotency).where(_is_key(tenant, key))).one()
    if known.body_digest != body_digest:
        raise Conflict(f"idempotency key {key!r} was used with another body; use a new key")
    return [int(reached) for reached in json.loads(known.answer)]


def keep_answer(conn: sa.Connection, tenant: str, key: str, answer: Sequence[int]) -> None:
    """Store the answer of the request that claimed the key."""
    conn.execute(sa.update(idempotency).where(_is_key(tenant, key)).values(answer=dump(list(answer))))


def forget_answers(conn: sa.Connection, before: datetime.datetime) -> int:
    """Delete older answers; return their number. A later request with one of their keys is a new request."""
    return conn.execute(sa.delete(idempotency).where(idempotency.c.created_at < to_micros(before))).rowcount


def _is_key(tenant: str, key: str) -> sa.ColumnElement[bool]:
    return sa.and_(idempotency.c.tenant == tenant, idempotency.c.key == key)
