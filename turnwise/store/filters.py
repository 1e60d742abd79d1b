"""Which sessions a reader wants."""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from turnwise.store.tables import sessions
from turnwise.types import SessionStatus, Split


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Conditions that all must hold; None leaves one out."""

    tenant: str | None = None
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    """A group's id; a session without one is a group under its own session id, and is not found by this."""
    split: Split | None = None
    status: SessionStatus | None = None

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on the table of sessions."""
        return [
            sessions.c[field.name] == getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        ]
