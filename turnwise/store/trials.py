"""Which sessions sample with a version on trial.

The transaction that creates a session assigns it to the running trial or not, and stores that with the session. So all
processes agree on it, from the session's first call to its last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b

import sqlalchemy as sa

from turnwise.store.statements import fetch
from turnwise.types import IMPORT, PolicyStatus, Session


def takes(version: int, share: float, session: Session) -> bool:
    """Return whether a session is among the share of new sessions that sample with a version on trial."""
    digest = blake2b(f"{version} {session.tenant} {session.session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def assign(conn: sa.Connection, sessions: Sequence[Session]) -> list[Session]:
    """Return new sessions as they are stored: those that the running trial takes name its version."""
    trials = fetch(conn, _RUNNING, ()) if sessions else []
    if not trials:
        return list(sessions)
    ((version, share),) = trials
    return [
        dataclasses.replace(session, canary=version)
        if session.opened_by != IMPORT and takes(version, share, session)
        else session
        for session in sessions
    ]


_RUNNING = (
    f"SELECT version, canary_share FROM policies WHERE status = '{PolicyStatus.CANARY.value}' "  # noqa: S608  a constant
    "AND activated_at IS NOT NULL ORDER BY version LIMIT 1"
)
