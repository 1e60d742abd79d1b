"""Labels of sessions: people and programs set and remove them, and lists and exports filter by them.

A label has no effect on training.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from turnwise.errors import InvalidRequest
from turnwise.store import rows
from turnwise.store.extensions import Column, Extension
from turnwise.store.schema import columns_of, index, metadata, of_session, sessions
from turnwise.store.selection import session_row
from turnwise.store.sessions import read_session
from turnwise.store.statements import is_among
from turnwise.types import Session, utc_now

MAX_LABELS = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label of a session, set by a person or a program."""

    label: str
    note: str | None = None
    """Free text."""
    written_by: str | None = None
    """The API key that wrote it; set by the proxy."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)


session_labels = sa.Table(
    "session_labels",
    metadata,
    of_session(),
    *columns_of(Label, key="label"),
    sa.Column("tenant", sa.Text, nullable=False),
    index("ix_session_labels_label", "label", "tenant", "session_pk"),
)
LABELS = rows.RowFormat(Label, session_labels, free_text=("note",))


def set_label(conn: sa.Connection, tenant: str, session_id: str, label: Label) -> Session:
    """Give a session a label, or replace the note of the label that it has; return the session.

    Raises:
        InvalidRequest: the session has `MAX_LABELS` other labels.
    """
    session_pk = session_row(conn, tenant, session_id, lock=True).session_pk
    others = session_labels.c.session_pk == session_pk, session_labels.c.label != label.label
    if conn.execute(sa.select(sa.func.count()).where(*others)).scalar_one() >= MAX_LABELS:
        raise InvalidRequest(f"session {session_id!r} has {MAX_LABELS} labels, which is the limit; remove one")
    _delete_label(conn, session_pk, label.label)
    conn.execute(sa.insert(session_labels).values(**LABELS.row(label, session_pk=session_pk, tenant=tenant)))
    return read_session(conn, tenant, session_id)


def remove_label(conn: sa.Connection, tenant: str, session_id: str, label: str) -> Session:
    _delete_label(conn, session_row(conn, tenant, session_id, lock=True).session_pk, label)
    return read_session(conn, tenant, session_id)


def _delete_label(conn: sa.Connection, session_pk: int, label: str) -> None:
    own = session_labels.c.session_pk == session_pk, session_labels.c.label == label
    conn.execute(sa.delete(session_labels).where(*own))


def _read_labels(
    conn: sa.Connection, _: str, tenant: str | None, session_ids: Collection[Any] | None
) -> dict[str, tuple[Label, ...]]:
    held = sessions.c
    found = sa.select(session_labels, held.session_id).join_from(session_labels, sessions)
    if session_ids is not None:
        found = found.where(is_among(conn.dialect, held.session_id, session_ids))
    if tenant is not None:
        found = found.where(held.tenant == tenant)
    labels: dict[str, tuple[Label, ...]] = {}
    for row in conn.execute(found.order_by(session_labels.c.session_pk, session_labels.c.label)):
        labels[row.session_id] = (*labels.get(row.session_id, ()), LABELS.record(row))
    return labels


def _has_label(label: str, tenant: str | None) -> sa.ColumnElement[bool]:
    labelled = sa.select(session_labels.c.session_pk).where(session_labels.c.label == label)
    if tenant is not None:
        labelled = labelled.where(session_labels.c.tenant == tenant)
    return sessions.c.session_pk.in_(labelled)


LABELS_OF_SESSION = Column(
    name="labels",
    of=frozenset({"session"}),
    read=_read_labels,
    empty=(),
    kind=tuple[Label, ...],
    description="Its labels in alphabetical order. A label has no effect on training; lists and exports can filter by "
    "it.",
    is_always_on=True,
)
EXTENSION = Extension(
    tables_of_sessions=(session_labels,), columns=(LABELS_OF_SESSION,), conditions={"label": _has_label}
)
