"""Labels of sessions: set, replaced, removed, filtered by, and deleted with their session."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish

from turnwise.errors import InvalidRequest, NotFound
from turnwise.store import experiences, retention, schema, sessions
from turnwise.store.database import Database
from turnwise.store.search import session_records
from turnwise.store.selection import SessionFilter
from turnwise.types import Label


def set_label(database: Database, session_id: str, label: str, note: str | None = None, tenant: str = "default"):
    with database.write() as conn:
        return sessions.set_label(conn, tenant, session_id, Label(label=label, note=note, written_by="me"))


def test_a_label_is_stored_with_its_note_replaced_and_removed(database: Database) -> None:
    add_session(database)
    set_label(database, "s", "look-at")
    labelled = set_label(database, "s", "golden", "good\0 \N{FIRE}")
    assert [(each.label, each.note, each.written_by) for each in labelled.labels] == [
        ("golden", "good\N{REPLACEMENT CHARACTER} \N{FIRE}", "me"),
        ("look-at", None, "me"),
    ]
    assert [each.note for each in set_label(database, "s", "golden", "better").labels] == ["better", None]
    with database.write() as conn:
        for _ in range(2):
            left = sessions.remove_label(conn, "default", "s", "golden")
            assert [each.label for each in left.labels] == ["look-at"]
        with pytest.raises(NotFound, match="no session 'other'"):
            sessions.remove_label(conn, "default", "other", "golden")


def test_lists_records_and_experiences_are_filtered_by_label(database: Database) -> None:
    for tenant in ("a", "b"):
        for session_id in ("one", "two"):
            add_session(database, session_id, tenant=tenant)
            finish(database, session_id, tenant=tenant)
        set_label(database, "one", "golden", tenant=tenant)
    with database.read() as conn:
        found, _ = sessions.list_sessions(conn, SessionFilter(tenant="a", label="golden"))
        assert [(each.tenant, each.session_id) for each in found] == [("a", "one")]
        both = [
            (each.session.tenant, each.session.labels[0].label)
            for each in session_records(conn, SessionFilter(label="golden"))
        ]
        assert both == [("a", "golden"), ("b", "golden")]
        trainable = experiences.experiences(conn, SessionFilter(tenant="b", label="golden"))
        assert [each.session_id for each in trainable] == ["one"]
        assert sessions.list_sessions(conn, SessionFilter(tenant="a", label="other")) == ([], False)


def test_a_session_has_a_limited_number_of_labels(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LABELS", 2)
    add_session(database)
    set_label(database, "s", "a")
    set_label(database, "s", "b")
    set_label(database, "s", "b", "a new note is no new label")
    with pytest.raises(InvalidRequest, match="has 2 labels, which is the limit; remove one"):
        set_label(database, "s", "c")


def test_labels_are_deleted_with_their_session(database: Database) -> None:
    for session_id in ("new", "old"):
        add_session(database, session_id, turns=0)
        set_label(database, session_id, "golden")
    with database.write() as conn:
        retention.delete_session(conn, "default", "new")
        conn.execute(sa.delete(schema.sessions).where(schema.sessions.c.session_id == "old"))
        assert conn.execute(sa.select(schema.session_labels)).all() == []
