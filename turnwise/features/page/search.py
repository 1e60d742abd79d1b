"""Searches in what sessions hold, and the rows that a list of sessions shows.

No index covers rewards, outcomes, versions and text, because each would cost the writer time for every turn. A search
reads sessions from the newest on, in windows, and stops after `MAX_SEARCHED` sessions or `MAX_SECONDS`. It returns
where it stopped, so a caller continues from there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.store import rows
from turnwise.store.schema import sessions, turns
from turnwise.store.selection import SessionFilter, session_rows
from turnwise.store.sessions import list_sessions, sessions_from_rows
from turnwise.store.statements import PAGE_BYTES, ROW_BYTES, is_among, size_of
from turnwise.types import TOKEN_BYTES, Outcome, Session

WINDOW = 50
MAX_SEARCHED = 2000
MAX_SECONDS = 2.0
MAX_TEXT_BYTES = 256 * 1024
"""Stored size above which a first prompt or a last reply is not read."""
MAX_COUNTED_TURNS = 1_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Conditions on what a session holds, all of which must hold; None means no condition."""

    min_reward: float | None = None
    max_reward: float | None = None
    termination_reason: str | None = None
    outcome: Outcome | None = None
    """Outcome of a turn. The fields after this one are conditions on the same turn."""
    reason: str | None = None
    policy_version: int | None = None
    text: str | None = None
    """Part of that turn's messages or reply; upper and lower case of ASCII letters are the same."""

    @property
    def is_empty(self) -> bool:
        return self == Contents()

    def has_session_row(self, row: rows.StoredRow) -> bool:
        if self.termination_reason is not None and row.termination_reason != self.termination_reason:
            return False
        return row.num_rewards > 0 or (self.min_reward is None and self.max_reward is None)

    def of_turn(self, dialect: sa.Dialect) -> list[sa.ColumnElement[bool]]:
        wanted: list[sa.ColumnElement[bool]] = []
        if self.outcome is not None:
            wanted.append(turns.c.outcome == self.outcome.value)
        if self.reason is not None:
            wanted.append(turns.c.reason == self.reason)
        if self.policy_version is not None:
            wanted.append(turns.c.policy_version_first <= self.policy_version)
            wanted.append(turns.c.policy_version_last >= self.policy_version)
        if self.text is not None:
            wanted.append(_has_text(self.text, dialect))
        return wanted

    def has_reward(self, session: Session) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        low = float("-inf") if self.min_reward is None else self.min_reward
        high = float("inf") if self.max_reward is None else self.max_reward
        return session.reward is not None and low <= session.reward <= high


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A page of found sessions."""

    sessions: list[Session]
    next_after: str | None
    num_searched: int


def search_sessions(
    conn: sa.Connection,
    wanted: SessionFilter,
    contents: Contents,
    *,
    limit: int = 100,
    after: str | None = None,
    max_bytes: int = PAGE_BYTES,
) -> Found:
    """Return sessions that satisfy both filters and follow the session `after`, newest first."""
    if contents.is_empty:
        listed, has_more = list_sessions(conn, wanted, limit=limit, after=after, max_bytes=max_bytes)
        return Found(listed, listed[-1].session_id if has_more else None, len(listed))
    matching: list[Session] = []
    num_searched = num_bytes = 0
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        window, has_more = session_rows(conn, wanted, limit=WINDOW, after=after, max_bytes=max_bytes)
        pks = _matching_pks(conn, window, contents)
        own = [row for row in window if row.session_pk in pks]
        found = {each.session_id: each for each in sessions_from_rows(conn, own)} if own else {}
        for row in window:
            num_searched, after = num_searched + 1, row.session_id
            session = found.get(row.session_id)
            if session is not None and contents.has_reward(session):
                matching.append(session)
                num_bytes += len(row.metadata) + len(row.sampling) + ROW_BYTES
            if len(matching) == limit or num_bytes > max_bytes:
                return Found(matching, after if has_more or row is not window[-1] else None, num_searched)
        if not has_more or num_searched >= MAX_SEARCHED or time.monotonic() > deadline:
            return Found(matching, after if has_more else None, num_searched)


def _matching_pks(conn: sa.Connection, window: list[rows.StoredRow], contents: Contents) -> set[int]:
    pks = {row.session_pk for row in window if contents.has_session_row(row)}
    of_turn = contents.of_turn(conn.dialect)
    if not of_turn or not pks:
        return pks
    found = sa.select(turns.c.session_pk).where(is_among(conn.dialect, turns.c.session_pk, pks), *of_turn)
    return set(conn.execute(found.distinct()).scalars())


def _has_text(text: str, dialect: sa.Dialect) -> sa.ColumnElement[bool]:
    once = rows.dump(text)[1:-1]
    needles = dict.fromkeys((once, rows.dump(once)[1:-1]))
    return sa.or_(
        *(_contains(dialect, column, needle) for column in (turns.c.messages, turns.c.response) for needle in needles)
    )


def _contains(dialect: sa.Dialect, column: sa.Column[str], text: str) -> sa.ColumnElement[bool]:
    # SQLite's LIKE ignores the case of ASCII letters, PostgreSQL's does not.
    contains = column.icontains if dialect.name == "postgresql" else column.contains
    return contains(text, autoescape=True)


class Ends(NamedTuple):
    """What is read of a session for its summary; a text is None if there is none, or if it is long."""

    first_prompt: str | None = None
    last_reply: str | None = None
    last_outcome: str | None = None
    num_sampled_tokens: int | None = None
    """None for a session with more than `MAX_COUNTED_TURNS` turns."""


def ends_of(conn: sa.Connection, found: Sequence[Session]) -> list[Ends]:
    """Return the ends of sessions of one tenant, in their order. Texts of more than `MAX_TEXT_BYTES` are not read."""
    if not found:
        return []
    dialect, held = conn.dialect, turns.c
    is_found = is_among(dialect, sessions.c.session_id, [session.session_id for session in found])
    of_sessions = [sessions.c.tenant == found[0].tenant, is_found]
    joined = sa.select(sessions.c.session_id).join_from(turns, sessions).where(*of_sessions)
    begins = joined.add_columns(_short(dialect, held.messages)).where(held.seq == 0)
    ends = joined.add_columns(_short(dialect, held.response), held.outcome).where(held.seq == sessions.c.num_turns - 1)
    counted = joined.add_columns(sa.func.sum(size_of(dialect, held.token_ids)))
    counted = counted.where(sessions.c.num_turns <= MAX_COUNTED_TURNS).group_by(sessions.c.session_id)
    first, last, num_bytes = ({row[0]: row[1:] for row in conn.execute(each)} for each in (begins, ends, counted))
    return [
        Ends._make(
            (
                *first.get(each.session_id, (None,)),
                *last.get(each.session_id, (None, None)),
                None
                if each.num_turns > MAX_COUNTED_TURNS
                else int(num_bytes.get(each.session_id, [0])[0] or 0) // TOKEN_BYTES,
            )
        )
        for each in found
    ]


def _short(dialect: sa.Dialect, column: sa.Column[Any]) -> sa.ColumnElement[str | None]:
    return sa.case((size_of(dialect, column) <= MAX_TEXT_BYTES, column), else_=None)
