"""Which sessions sample with another version than the served one: the arms of a canary and of the hold-out.

The transaction that creates a session assigns it to an arm or to none, and stores that with the session. So all
processes agree on it, from the session's first call to its last. A canary takes a share of its policy's sessions. The
hold-out takes a share of those without a group, and makes them `eval` sessions: what an old version samples is not
trained, and nobody waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import sqlalchemy as sa

from turnwise.store.statements import fetch
from turnwise.types import IMPORT, PolicyStatus, Session, Split


def takes(version: int, share: float, session: Session) -> bool:
    """Return whether a session is among the share of new sessions that sample with this version."""
    digest = blake2b(f"{version} {session.tenant} {session.session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def assign(conn: sa.Connection, sessions: Sequence[Session]) -> list[Session]:
    """Return new sessions as they are stored: those that an arm takes name its version."""
    arms = fetch(conn, _RUNNING) if sessions else []
    return [_assigned(session, arms) for session in sessions] if arms else list(sessions)


def _assigned(session: Session, arms: Sequence[Sequence[Any]]) -> Session:
    """Return a session with its arm; the hold-out, which is the older version, takes its share first."""
    if session.opened_by == IMPORT:
        return session
    for policy_id, version, share, status in arms:
        if policy_id != session.policy_id or not takes(version, share, session):
            continue
        if status == PolicyStatus.CANARY.value:
            return dataclasses.replace(session, arm=version)
        if session.split is Split.TRAIN and session.group_id is None and session.group_size is None:
            return dataclasses.replace(session, arm=version, split=Split.EVAL)
    return session


_RUNNING = (
    "SELECT policy_id, version, arm_share, status FROM policy_versions "  # noqa: S608  constants
    f"WHERE status IN ('{PolicyStatus.CANARY.value}', '{PolicyStatus.HOLDOUT.value}') "
    "AND arm_share IS NOT NULL AND activated_at IS NOT NULL ORDER BY version"
)
