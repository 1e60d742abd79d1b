"""Labels of sessions: marks such as `golden` or `look-at`, each with an optional note."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.store import rows
from turnwise.store.statements import is_among
from turnwise.store.tables import session_labels
from turnwise.types import Label


def labels_of(conn: sa.Connection, session_pks: Sequence[int]) -> dict[int, tuple[Label, ...]]:
    """Return the labels of these sessions in alphabetical order, by session."""
    found = conn.execute(
        sa.select(session_labels)
        .where(is_among(conn.dialect, session_labels.c.session_pk, session_pks))
        .order_by(session_labels.c.session_pk, session_labels.c.label)
    )
    by_session = rows.by_key(found, "session_pk", rows.LABELS.record)
    return {session_pk: tuple(labels) for session_pk, labels in by_session.items()}
