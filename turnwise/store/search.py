"""Search in what sessions hold: rewards, outcomes, versions and text.

No index covers these conditions, because each would cost the writer time for every turn. A search reads sessions from
the newest on, in windows, and stops after `MAX_SEARCHED` sessions or `MAX_SECONDS`. It returns where it stopped, so a
caller continues from there.
"""

from __future__ import annotations

import dataclasses
import time

import sqlalchemy as sa

from turnwise.store import pages, queries, rows
from turnwise.store.session_filter import SessionFilter
from turnwise.store.statements import has_text, is_among
from turnwise.store.tables import turns
from turnwise.types import Outcome, Session

WINDOW = 50
"""Sessions that are read at once."""
MAX_SEARCHED = 2000
"""Sessions after which one search stops."""
MAX_SECONDS = 2.0
"""Time after which one search starts no further window."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Conditions on what a session holds, all of which must hold; None means no condition."""

    min_reward: float | None = None
    max_reward: float | None = None
    termination_reason: str | None = None
    outcome: Outcome | None = None
    """Of a turn. One turn must satisfy this condition and all that follow."""
    reason: str | None = None
    """Of that turn's outcome."""
    policy_version: int | None = None
    """A version that sampled in that turn."""
    text: str | None = None
    """Part of that turn's messages or reply; upper and lower case of ASCII letters are the same."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no condition."""
        return self == Contents()

    def has_session_row(self, row: rows.StoredRow) -> bool:
        """Return whether a session's row satisfies the conditions on it."""
        if self.termination_reason is not None and row.termination_reason != self.termination_reason:
            return False
        return row.num_rewards > 0 or (self.min_reward is None and self.max_reward is None)

    def of_turn(self, dialect: sa.Dialect) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the table of turns."""
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
        """Return whether the session's reward is in the range."""
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
    """The last session that was looked at, from which the search continues; None at the end."""
    num_searched: int
    """Number of sessions that were looked at."""


def search_sessions(
    conn: sa.Connection,
    wanted: SessionFilter,
    contents: Contents,
    *,
    limit: int = 100,
    after: str | None = None,
    max_bytes: int = pages.MAX_BYTES,
) -> Found:
    """Return sessions that satisfy both filters and follow the session `after`, newest first.

    Args:
        conn: A transaction.
        wanted: The filter on sessions.
        contents: The filter on what they hold.
        limit: Maximum number of sessions.
        after: The last session of the page before; None for the first page.
        max_bytes: Size at which the page ends before its limit.

    Raises:
        NotFound: no session `after`.
    """
    if contents.is_empty:
        listed, has_more = queries.sessions(conn, wanted, limit=limit, after=after, max_bytes=max_bytes)
        return Found(listed, listed[-1].session_id if has_more else None, len(listed))
    matching: list[Session] = []
    num_searched = num_bytes = 0
    deadline = time.monotonic() + MAX_SECONDS
    while True:
        window, has_more = queries.session_rows(conn, wanted, limit=WINDOW, after=after, max_bytes=max_bytes)
        pks = _matching_pks(conn, window, contents)
        own = [row for row in window if row.session_pk in pks]
        found = {each.session_id: each for each in queries.sessions_from_rows(conn, own)} if own else {}
        for row in window:
            num_searched, after = num_searched + 1, row.session_id
            session = found.get(row.session_id)
            if session is not None and contents.has_reward(session):
                matching.append(session)
                num_bytes += len(row.metadata) + len(row.sampling) + pages.ROW_BYTES
            if len(matching) == limit or num_bytes > max_bytes:
                return Found(matching, after if has_more or row is not window[-1] else None, num_searched)
        if not has_more or num_searched >= MAX_SEARCHED or time.monotonic() > deadline:
            return Found(matching, after if has_more else None, num_searched)


def _matching_pks(conn: sa.Connection, window: list[rows.StoredRow], contents: Contents) -> set[int]:
    """Return the keys of the sessions that satisfy all conditions but the range of rewards."""
    pks = {row.session_pk for row in window if contents.has_session_row(row)}
    of_turn = contents.of_turn(conn.dialect)
    if not of_turn or not pks:
        return pks
    found = sa.select(turns.c.session_pk).where(is_among(conn.dialect, turns.c.session_pk, pks), *of_turn)
    return set(conn.execute(found.distinct()).scalars())


def _has_text(text: str, dialect: sa.Dialect) -> sa.ColumnElement[bool]:
    """Return the condition that a turn's stored JSON holds a text, also inside the JSON of a tool call's arguments."""
    once = rows.dump(text)[1:-1]
    needles = dict.fromkeys((once, rows.dump(once)[1:-1]))
    return sa.or_(
        *(has_text(dialect, column, needle) for column in (turns.c.messages, turns.c.response) for needle in needles)
    )
