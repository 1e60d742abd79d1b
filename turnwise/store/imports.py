"""Find the sessions that an earlier import stored."""

from __future__ import annotations

import json
from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store.tables import sessions


def imported_digests(conn: sa.Connection, tenant: str, session_ids: Collection[str]) -> dict[str, str]:
    """Return the digest of the lines that each of these sessions was imported from; sessions not stored are left out.

    A session that was not imported has an empty digest.
    """
    found = conn.execute(
        sa.select(sessions.c.session_id, sessions.c.metadata).where(
            sessions.c.tenant == tenant, sessions.c.session_id.in_(session_ids)
        )
    )
    return {session_id: json.loads(text).get("imported", {}).get("digest", "") for session_id, text in found}
