"""Whole sessions for exports, in batches of one transaction: bounded memory, and a consistent snapshot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from turnwise.store import extensions, rows
from turnwise.store.experiences import next_rows
from turnwise.store.policies import names_of_policies
from turnwise.store.schema import sessions, trained_sessions
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import sessions_with_lines
from turnwise.store.turns import TurnView, turn_views, turns_of
from turnwise.store.updates import Updates, turn_digests
from turnwise.types import Reward, Session, SessionKey, Turn


@dataclasses.dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session with all its stored data."""

    session: Session
    policy: str | None
    """Name of its own policy; None in another database than the one that it is from."""
    policies: Mapping[int, str]
    """Names of all policies by number."""
    turns: list[Turn]
    rewards: list[Reward]
    updates: Updates
    columns: Mapping[str, Any]
    """What features show of each session."""

    def views(self) -> list[TurnView]:
        return turn_views(self.turns, self.rewards, self.updates)


def count_sessions(conn: sa.Connection, wanted: SessionFilter) -> int:
    return int(conn.execute(sa.select(sa.func.count()).select_from(sessions).where(*wanted.clauses())).scalar_one())


def session_records(conn: sa.Connection, wanted: SessionFilter) -> Iterator[SessionRecord]:
    """Yield the sessions that a filter selects, oldest first, over a transaction that stays open meanwhile."""
    names = names_of_policies(conn)
    clauses, found = wanted.clauses(), list[rows.StoredRow]()
    while found := [*next_rows(conn, found, *clauses)]:
        turns = turns_of(conn, [row.session_pk for row in found])
        ids, always = [row.session_id for row in found], extensions.always_on()
        columns = {
            tenant: extensions.read_columns(conn, "session", tenant, ids, wanted=always)
            for tenant in {row.tenant for row in found}
        }
        for row, (session, lines, updates) in zip(found, sessions_with_lines(conn, found), strict=True):
            shown, policy = columns[row.tenant].add({}, row.session_id), names.get(row.policy_id)
            yield SessionRecord(session, policy, names, turns.get(row.session_pk, []), lines, updates, shown)


def imported_digests(conn: sa.Connection, tenant: str, session_ids: Collection[str]) -> dict[str, str]:
    """Return the digest of the lines that each of these sessions was imported from; sessions not stored are left out.

    A session that was not imported has an empty digest.
    """
    found = conn.execute(
        sa.select(sessions.c.session_id, sessions.c.metadata).where(
            sessions.c.tenant == tenant, sessions.c.session_id.in_(session_ids)
        )
    )
    chosen = {session_id: json.loads(text).get("imported") for session_id, text in found}  # perhaps by a client
    return {name: value.get("digest", "") if isinstance(value, dict) else "" for name, value in chosen.items()}


def trained_digests(conn: sa.Connection, update_id: int) -> dict[SessionKey, tuple[bytes | None, bytes | None]]:
    """Return the digests of the sessions of an update that are still stored: as recorded with it, and as they are now.

    The recorded one is None if a turn was deleted before the update was recorded.
    """
    found = conn.execute(
        sa.select(sessions.c.tenant, sessions.c.session_id, trained_sessions.c.advantages, trained_sessions.c.digest)
        .join_from(trained_sessions, sessions)
        .where(trained_sessions.c.update_id == update_id)
    ).all()
    advantages: list[dict[str, float]] = [json.loads(row.advantages) for row in found]
    of_turns = turn_digests(conn, {turn_id for each in advantages for turn_id in each})
    return {
        (row.tenant, row.session_id): (row.digest, rows.session_digest(each, of_turns))
        for row, each in zip(found, advantages, strict=True)
    }
