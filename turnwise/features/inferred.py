"""How the sessions of calls that name none are found in the store: by their conversations, and by idempotency keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import sqlalchemy as sa

from turnwise.store import rewards
from turnwise.store.database import clock
from turnwise.store.extensions import Extension
from turnwise.store.schema import sessions, turns
from turnwise.store.sessions import REWARDED_IDLE, UNNAMED_WITH_REWARD
from turnwise.types import DEFAULT_POLICY, SessionStatus

MOST_COUNTED = 1000


def sessions_of_conversation(
    conn: sa.Connection,
    tenant: str,
    key_id: str,
    digests: Sequence[bytes],
    *,
    limit: int,
    policy_id: int | None = DEFAULT_POLICY,
    by: Literal["history_digest", "dialogue_digest"] = "history_digest",
) -> tuple[bytes, list[str]]:
    """Return the open sessions that contain the longest of these conversations and were inferred for this API key.

    A policy has sampled the conversation's last reply, None stands for any. The digests are those of the conversations,
    longest first. Returned are the digest that was found and the ids of the
    newest sessions, oldest first.
    """
    column = turns.c[by]
    found = conn.execute(
        sa.select(column.label("digest"), sessions.c.session_id)
        .distinct()
        .add_columns(sessions.c.session_pk)
        .join_from(turns, sessions)
        .where(
            turns.c.inferred_by == key_id,
            column.in_(digests),
            sessions.c.tenant == tenant,
            sa.true() if policy_id is None else turns.c.policy_id == policy_id,
            sessions.c.status == SessionStatus.OPEN.value,
        )
        .order_by(sessions.c.session_pk)
    ).all()
    for digest in digests:
        session_ids = [str(row.session_id) for row in found if row.digest == digest]
        if session_ids:
            return digest, session_ids[-limit:]
    return b"", []


def claim_target(conn: sa.Connection, tenant: str, key_id: str, key: str, session_id: str) -> str:
    """Bind an API key's idempotency key to a session, if it is not bound yet; return the session that it is bound to.

    A retry at another proxy, which may find another session, joins it.
    """
    known = rewards.claim(conn, tenant, f"call/{key_id}", key, b"", session_id)  # no session's id has a slash
    return session_id if known is None else str(known.answer)


def _findings(conn: sa.Connection, tenant: str | None) -> Iterator[tuple[str, str]]:
    """Yield when live traffic counts for the trainer, where sessions of it only have to be over."""
    at = sessions.c.last_active_at
    waiting = sa.select(at).where(UNNAMED_WITH_REWARD, sa.true() if tenant is None else sessions.c.tenant == tenant)
    some = waiting.order_by(at).limit(MOST_COUNTED).subquery()
    number, first, last = conn.execute(
        sa.select(sa.func.count(), sa.func.min(some.c.last_active_at), sa.func.max(some.c.last_active_at))
    ).one()
    now, idle = clock(conn), REWARDED_IDLE.total_seconds()
    if number:
        left = [max(0.0, idle - (now - each) / 1e6) / 60 for each in (first, last)]
        text = f"{number} rewarded sessions that no call names are open: each is over, and counts as a single session, "
        text += f"after {idle / 60:.0f} minutes without a call, the first in {left[0]:.0f} min, the last in "
        yield "live traffic", f"{text}{left[1]:.0f} min"


EXTENSION = Extension(findings=_findings)
