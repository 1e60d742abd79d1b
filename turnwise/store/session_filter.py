"""Which sessions a reader wants, and their rows: for lists, searches, experiences, exports and checks alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from turnwise.errors import InvalidRequest
from turnwise.store import policies, rows
from turnwise.store.pages import num_within
from turnwise.store.tables import DELETED, session_labels, sessions
from turnwise.types import SessionStatus, Split

_SESSIONS_AT_ONCE = 32
_TURNS_AT_ONCE = 500
"""Most sessions, and most turns of several sessions, that are read at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Conditions on a session, all of which must hold; None means no condition."""

    tenant: str | None = None
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    """A group's id. It does not match a session without `group_id`, whose group has the session id."""
    split: Split | None = None
    status: SessionStatus | None = None
    user_id: str | None = None
    label: str | None = None
    policy: str | None = None
    """A policy's name."""
    policy_id: int | None = None
    metadata: str | None = None
    """`KEY=VALUE`: the session's metadata have this value, which is JSON or else a text, at this key."""

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the table of sessions."""
        wanted = [
            sessions.c[field.name] == getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("label", "metadata", "policy") and getattr(self, field.name) is not None
        ]
        if not self.tenant and self.status is None:
            wanted.append(sessions.c.status != DELETED)
        if self.policy is not None:
            wanted.append(policies.is_named(sessions.c.policy_id, self.tenant, self.policy))
        if self.metadata is not None:
            wanted.append(_has_metadata(self.metadata))
        if self.label is not None:
            labelled = sa.select(session_labels.c.session_pk).where(session_labels.c.label == self.label)
            if self.tenant is not None:
                labelled = labelled.where(session_labels.c.tenant == self.tenant)
            wanted.append(sessions.c.session_pk.in_(labelled))
        return wanted


def is_session(tenant: str, session_id: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return sessions.c.tenant == tenant, sessions.c.session_id == session_id


def _has_metadata(condition: str) -> sa.ColumnElement[bool]:
    """Return the condition on the stored text, in which a pair ends with a comma or a brace."""
    key, sign, text = condition.partition("=")
    if not key or not sign:
        raise InvalidRequest(f"a metadata filter is KEY=VALUE, not {condition!r}", param="metadata")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    pair = rows.dump({key: value})[1:-1]
    # Not LIKE: SQLite's ignores the case of ASCII letters.
    return sa.or_(*(sa.func.replace(sessions.c.metadata, pair + end, "") != sessions.c.metadata for end in ",}"))


def rows_in_batches(conn: sa.Connection, *wanted: sa.ColumnElement[bool]) -> Iterator[Sequence[rows.StoredRow]]:
    """Yield the rows of sessions, oldest first: of some that have so few turns that these are read at once."""
    behind = 0
    while True:
        page = sa.select(sessions).where(*wanted, sessions.c.session_pk > behind).order_by(sessions.c.session_pk)
        found = conn.execute(page.limit(_SESSIONS_AT_ONCE)).all()
        if not found:
            return
        batch = found[: num_within((row.num_turns for row in found), _TURNS_AT_ONCE)]
        behind = batch[-1].session_pk
        yield batch
