"""Feedback and labels of sessions."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, make_turn
from support.store_fill import acknowledge

from turnwise.errors import Conflict, InvalidRequest, NotFound
from turnwise.features import feedback, labels, retention
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.features.labels import Label
from turnwise.features.records import session_records
from turnwise.store import claims, experiences, schema, sessions, turns
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import Session, Split


def test_a_session_has_a_limited_number_of_feedback(database, monkeypatch):
    """Feedback of a target, kind and name that there is replaces it, and the limit of one session is its own."""
    monkeypatch.setattr(feedback, "MAX_FEEDBACK", 2)
    add_session(database, "s")
    add_session(database, "other")

    def add(conn: sa.Connection, name: str, session_id: str = "s") -> None:
        said = Feedback(session_id=session_id, kind=FeedbackKind.COMMENT, name=name, content={"value": name})
        feedback.add(conn, said)

    with database.write() as conn:
        for name in ("a", "b", "a"):
            add(conn, name)
        with pytest.raises(InvalidRequest, match="2 other feedback, which is the limit"):
            add(conn, "c")
        add(conn, "c", "other")
    with database.read() as conn:
        assert {each.name for each in feedback.feedback_of(conn, "default", "other")} == {"c"}


def edited(database: Database, text: str, reply_to: str = "s-t1") -> tuple[Feedback, list[feedback.Member]]:
    with database.read() as conn:
        original = sessions.read_session(conn, "default", "s")
        _, path = turns.turns_to(conn, reply_to, "default")
    given = Feedback(
        session_id="s",
        turn_id=reply_to,
        kind=FeedbackKind.DEMONSTRATION,
        content={"value": text},
        group_id=feedback.new_group_id(),
    )
    better, worse = (feedback.sampled(path, given, original, number, 2) for number in (0, 1))
    return given, [feedback.written(better, text, np.array([7, 8], np.int32)), worse]


def test_an_edit_that_is_refused_leaves_no_session(database, monkeypatch):
    """The limits of feedback and of copies, a used key, and a turn whose session is deleted meanwhile."""
    add_session(database, "s", turns=1)
    given, pair = edited(database, "Rome")
    with database.write() as conn:
        feedback.add(conn, given, group=pair, idempotency_key="k", body_digest=b"1")
    other, others = edited(database, "Oslo")
    refusals: list[tuple[str, int, dict[str, Any], type[Exception]]] = [
        ("MAX_FEEDBACK", 0, {}, InvalidRequest),
        ("MAX_COPIES", 3, {}, InvalidRequest),
        ("MAX_FEEDBACK", 9, {"idempotency_key": "k", "body_digest": b"2"}, Conflict),
    ]
    for name, limit, options, error in refusals:
        monkeypatch.setattr(feedback, name, limit)
        with pytest.raises(error), database.write() as conn:
            feedback.add(conn, dataclasses.replace(other, name="other"), group=others, **options)
    with database.read() as conn:
        found, _ = sessions.list_sessions(conn, SessionFilter(tenant="default"))
    assert [each.session_id for each in found] == [f"{given.group_id}-1", f"{given.group_id}-0", "s"]
    retention.delete_all(database, lambda conn: retention.delete_session(conn, "default", "s"))
    with pytest.raises(NotFound), database.write() as conn:
        feedback.add(conn, other, group=others)
    with database.read() as conn:
        assert sessions.list_sessions(conn, SessionFilter(tenant="default"))[0] == []


def test_the_sessions_of_a_demonstration_are_of_the_same_policy_user_task_and_split():
    """So its policy learns from it, and the deletion of the user's data finds it."""
    original = Session(
        session_id="s", tenant="acme", task_id="refund", split=Split.EVAL, policy_id=7, user_id="kim", group_id="g"
    )
    given = Feedback(
        session_id="s", tenant="acme", turn_id="t1", kind=FeedbackKind.DEMONSTRATION, content={}, group_id="feedback-1"
    )
    made = feedback.sampled([make_turn("t1")], given, original, 1, 2).session
    for field in ("tenant", "task_id", "split", "policy_id", "user_id"):
        assert getattr(made, field) == getattr(original, field), field
    assert (made.session_id, made.group_id, made.group_size) == ("feedback-1-1", "feedback-1", 2)


def test_a_rating_after_training_makes_the_session_ready_again_where_revisions_are_trained(database):
    add_finished(database, "s", tenant="t")
    with database.write() as conn:
        acknowledge(conn, 1, "s")
        said = Feedback(session_id="s", tenant="t", kind=FeedbackKind.BOOLEAN, name="thumb", content={"value": True})
        for retrain, ready in ((False, (0, 0)), (True, (0, 1))):
            feedback.add(conn, said, reward=0.5, retrain=retrain)
            assert claims.num_claimable(conn) == ready


def set_label(database: Database, session_id: str, label: str, note: str | None = None, tenant: str = "default"):
    with database.write() as conn:
        return labels.set_label(conn, tenant, session_id, Label(label=label, note=note, written_by="me"))


def test_lists_records_and_experiences_are_filtered_by_label(database):
    for tenant in ("a", "b"):
        for session_id in ("one", "two"):
            add_finished(database, session_id, tenant=tenant)
        set_label(database, "one", "golden", tenant=tenant)
    with database.read() as conn:
        found, _ = sessions.list_sessions(conn, SessionFilter(tenant="a", label="golden"))
        assert [(each.tenant, each.session_id) for each in found] == [("a", "one")]
        both = [
            (each.session.tenant, each.columns["labels"][0].label)
            for each in session_records(conn, SessionFilter(label="golden"))
        ]
        assert both == [("a", "golden"), ("b", "golden")]
        trainable = experiences.experiences(conn, SessionFilter(tenant="b", label="golden"))
        assert [each.session_id for each in trainable] == ["one"]
        assert sessions.list_sessions(conn, SessionFilter(tenant="a", label="other")) == ([], False)


def test_a_session_has_a_limited_number_of_labels(database, monkeypatch):
    monkeypatch.setattr(labels, "MAX_LABELS", 2)
    add_session(database)
    set_label(database, "s", "a")
    set_label(database, "s", "b")
    set_label(database, "s", "b", "a new note is no new label")
    with pytest.raises(InvalidRequest, match="has 2 labels, which is the limit; remove one"):
        set_label(database, "s", "c")


def test_labels_are_deleted_with_their_session(database):
    for session_id in ("new", "old"):
        add_session(database, session_id, turns=0)
        set_label(database, session_id, "golden")
    with database.write() as conn:
        retention.delete_session(conn, "default", "new")
        conn.execute(sa.delete(schema.sessions).where(schema.sessions.c.session_id == "old"))
        assert conn.execute(sa.select(labels.session_labels)).all() == []
