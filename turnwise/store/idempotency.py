"""Stored answers by `Idempotency-Key`: a repeated request gets the first answer and writes nothing.

A key belongs to a tenant and to the session that the request rewards: keys are easy to guess, and a request for one
session must not use up a key of another one. Requests for several sessions have keys of their own.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store.rows import StoredRow, dump, to_micros
from turnwise.store.statements import delete_some, insert_ignoring, is_among
from turnwise.store.tables import idempotency
from turnwise.types import SessionKey, utc_now

SEVERAL = ""
"""Session id of requests for several sessions."""


def claim_key(conn: sa.Connection, tenant: str, session_id: str, key: str, body_digest: bytes) -> list[int] | None:
    """Claim an idempotency key, or return the answer of the request that claimed it first.

    Raises:
        Conflict: the key was used with another body.
    """
    known = _claim(conn, tenant, session_id, key, body_digest, "[]")
    if known is None:
        return None
    if known.body_digest != body_digest:
        raise Conflict(f"idempotency key {key!r} was used with another body; use a new key")
    return [int(reached) for reached in json.loads(known.answer)]


def keep_answer(conn: sa.Connection, tenant: str, session_id: str, key: str, answer: Sequence[int]) -> None:
    conn.execute(sa.update(idempotency).where(_is_key(tenant, session_id, key)).values(answer=dump(list(answer))))


def claim_target(conn: sa.Connection, tenant: str, key_id: str, key: str, session_id: str) -> str:
    """Bind an API key's idempotency key to a session, if it is not bound yet; return the session that it is bound to.

    A retry at another proxy, which may find another session, joins it.
    """
    known = _claim(conn, tenant, f"call/{key_id}", key, b"", session_id)  # no session's id has a slash
    return session_id if known is None else str(known.answer)


def _claim(
    conn: sa.Connection, tenant: str, session_id: str, key: str, body_digest: bytes, answer: str
) -> StoredRow | None:
    """Store the answer of a key that has none, and return None; else return the row that is stored."""
    row = {"tenant": tenant, "session_id": session_id, "key": key, "body_digest": body_digest, "answer": answer}
    if insert_ignoring(conn, idempotency, row | {"created_at": to_micros(utc_now())}):
        return None
    return conn.execute(sa.select(idempotency).where(_is_key(tenant, session_id, key))).one()


def forget_answers(conn: sa.Connection, before: datetime.datetime) -> int:
    """Delete some older answers; return their number. A later request with one of their keys is a new request."""
    return delete_some(conn, idempotency, idempotency.c.created_at < to_micros(before))


def forget_sessions(conn: sa.Connection, deleted: Sequence[SessionKey]) -> int:
    """Delete answers for deleted sessions, at most `ROWS_AT_ONCE`; return their number."""
    c, dialect = idempotency.c, conn.dialect
    # The databases search by the first two conditions; the last one excludes other sessions of these tenants and ids.
    tenants, ids = {tenant for tenant, _ in deleted}, {session_id for _, session_id in deleted}
    is_searched = is_among(dialect, c.tenant, tenants), is_among(dialect, c.session_id, ids)
    return delete_some(conn, idempotency, sa.and_(*is_searched, sa.tuple_(c.tenant, c.session_id).in_(deleted)))


def _is_key(tenant: str, session_id: str, key: str) -> sa.ColumnElement[bool]:
    of_session = sa.and_(idempotency.c.tenant == tenant, idempotency.c.session_id == session_id)
    return sa.and_(of_session, idempotency.c.key == key)
