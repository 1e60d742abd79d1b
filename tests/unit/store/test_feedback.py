"""Feedback as it is stored; tests/contract/test_feedback.py has what follows from it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish
from support.store_fill import acknowledge

from turnwise.errors import InvalidRequest
from turnwise.store import claims, feedback
from turnwise.store.database import Database
from turnwise.types import Feedback, FeedbackKind, Session, Split


def test_a_session_has_a_limited_number_of_feedback(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_sessions_of_a_demonstration_are_of_the_same_policy_user_task_and_split() -> None:
    """So its policy learns from it, and the deletion of the user's data finds it."""
    original = Session(
        session_id="s", tenant="acme", task_id="refund", split=Split.EVAL, policy_id=7, user_id="kim", group_id="g"
    )
    given = Feedback(
        session_id="s", tenant="acme", turn_id="t1", kind=FeedbackKind.DEMONSTRATION, content={}, group_id="feedback-1"
    )
    made = feedback.member(given, original, 1, 2)
    for field in ("tenant", "task_id", "split", "policy_id", "user_id"):
        assert getattr(made, field) == getattr(original, field), field
    assert (made.session_id, made.group_id, made.group_size) == ("feedback-1-1", "feedback-1", 2)


def test_a_rating_after_training_makes_the_session_ready_again_where_revisions_are_trained(database: Database) -> None:
    add_session(database, "s", tenant="t")
    finish(database, "s", tenant="t")
    with database.write() as conn:
        acknowledge(conn, 1, "s")
        said = Feedback(session_id="s", tenant="t", kind=FeedbackKind.BOOLEAN, name="thumb", content={"value": True})
        for retrain, ready in ((False, (0, 0)), (True, (0, 1))):
            feedback.add(conn, said, reward=0.5, retrain=retrain)
            assert claims.num_claimable(conn) == ready
