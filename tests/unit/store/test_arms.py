"""Which sessions a trial takes, its statistics in the ledger, and the states of a version under trial."""

import dataclasses
import datetime

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish, make_turn, sampled_by

from turnwise.errors import NotFound
from turnwise.features import arms
from turnwise.features.arms import Arm, arms_since
from turnwise.features.copies import FORKED
from turnwise.store import selection, serving, sessions, turns, versions
from turnwise.store.database import Database
from turnwise.store.sessions import create_session, read_session
from turnwise.types import IMPORT, Outcome, PolicyStatus, PolicyVersion, Session, Split, utc_now

SINCE = utc_now() - datetime.timedelta(hours=1)


def play(
    database: Database,
    session_id: str,
    version: int,
    value: float | None = 1.0,
    opened_by: str | None = None,
    **fields: object,
) -> None:
    add_session(database, session_id, opened_by=opened_by, of_turns={**sampled_by(version), **fields})
    if value is not None:
        finish(database, session_id, value)
        return
    with database.write() as connection:
        sessions.end_session(connection, "default", session_id)


def compared(database: Database, since: datetime.datetime = SINCE) -> tuple[Arm, Arm]:
    with database.read() as connection:
        return arms_since(connection, since, (8, 7))


def test_finished_sessions_count_for_the_version_that_they_sampled_with(database):
    play(database, "a", 8, 0.5)
    play(database, "b", 7, 1.0)
    play(database, "c", 7, 0.0)
    play(database, "d", 6, 0.0)
    canary, control = compared(database)
    assert canary == Arm((0.5,), 1, 1, 0, {"reward": [0.5]})
    assert dataclasses.replace(control, rewards=(), by_name={}) == Arm((), 2, 2, 0)
    assert sorted(control.rewards) == [0.0, 1.0]


def test_a_session_without_a_reward_counts_and_an_open_one_does_not(database):
    play(database, "a", 8, None)
    add_session(database, "open")
    with database.write() as connection:
        turn = make_turn("t9", session_id="open", policy_version_last=8)
        turns.append_turns(connection, [dataclasses.replace(turn, turn_id="open-t9")])
    assert compared(database)[0] == Arm((), 1, 1, 0)


def test_copies_of_turns_do_not_count(database):
    """Those of a demonstration were sampled in another session, and so were the turns that a fork begins with."""
    play(database, "demonstration", 8, opened_by=IMPORT)
    play(database, "fork", 8, outcome=Outcome.UNTRAINABLE, reason=FORKED)
    assert compared(database) == (Arm(), Arm())


def test_the_summary_of_an_arm_has_the_share_of_broken_turns():
    assert Arm((0.5, 1.0), 3, 4, 3).summary(8)["broken_share"] == 0.75


def test_failed_untrainable_and_cut_turns_are_broken(database):
    play(database, "a", 8, outcome=Outcome.ERROR)
    play(database, "b", 8, outcome=Outcome.UNTRAINABLE)
    play(database, "c", 8, finish_reason="length")
    play(database, "d", 8, outcome=Outcome.RETOKENISED)
    canary, _ = compared(database)
    assert (canary.num_turns, canary.num_broken) == (4, 3)


def test_sessions_from_before_the_trial_are_not_compared(database):
    play(database, "a", 8)
    assert compared(database, utc_now() + datetime.timedelta(hours=1)) == (Arm(), Arm())


def test_a_trial_is_started_cancelled_and_permitted_again(database):
    """published → canary → published; failed → published; an active one is not touched."""
    with database.write() as connection:
        assert serving.serving_state(connection) == serving.NO_VERSIONS
        for version in (0, 1):
            versions.publish_version(connection, PolicyVersion(version=version, path=f"/{version}"))
        serving.activate_version(connection, 0)
        prepared = arms.try_version(connection, 1, None)
        assert (prepared.status, prepared.activated_at) == (PolicyStatus.CANARY, None)
        tried = arms.try_version(connection, 1, 0.25)
        assert (tried.status, tried.arm_share) == (PolicyStatus.CANARY, 0.25)
        assert tried.activated_at is not None
        state = serving.serving_state(connection)
        assert (state.active, arms.canary_of(state)) == (versions.get_version(connection, 0), tried)
        again = serving.reconsider_version(connection, 1)
        assert (again.status, again.activated_at) == (PolicyStatus.PUBLISHED, None)
        serving.fail_version(connection, 1, "worse")
        again = serving.reconsider_version(connection, 1)
        assert (again.status, again.error) == (PolicyStatus.PUBLISHED, None)
        assert serving.reconsider_version(connection, 0).status is PolicyStatus.ACTIVE
        with pytest.raises(NotFound, match="version 9"):
            arms.try_version(connection, 9, None)
        with pytest.raises(NotFound, match="version 9"):
            serving.reconsider_version(connection, 9)


def create_one(conn: sa.Connection, session: Session) -> Session:
    return create_session(conn, session)[0]


def numbered(count: int) -> list[Session]:
    return [Session(session_id=f"s{number}") for number in range(count)]


def test_a_trial_gets_its_share_of_new_sessions_and_always_the_same_ones():
    """Of 10,000 a share of 0.2 is 2,000 ± 40 (one standard deviation); the tolerance is five of them."""
    taken = [selection.takes(7, 0.2, session) for session in numbered(10_000)]
    assert abs(sum(taken) - 2000) < 200
    assert taken == [selection.takes(7, 0.2, session) for session in numbered(10_000)]


def test_another_version_is_tried_by_other_sessions():
    """Of independent draws of 0.2 each, 0.04 are in both: 400 of 10,000, ± 20."""
    both = [selection.takes(7, 0.2, session) and selection.takes(8, 0.2, session) for session in numbered(10_000)]
    assert abs(sum(both) - 400) < 100


def test_only_sessions_that_are_created_while_a_trial_runs_are_in_it(database):
    """A trial that is only prepared takes none; what a session was assigned to stays."""
    found = {}
    with database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=1, path="/1"))
        found["before"] = create_one(connection, Session(session_id="before"))
        arms.try_version(connection, 1, None)
        found["prepared"] = create_one(connection, Session(session_id="prepared"))
        arms.try_version(connection, 1, 1.0)
        found["during"] = create_one(connection, Session(session_id="during"))
        found["judged"] = create_one(connection, Session(session_id="judged", split=Split.EVAL))
        found["imported"] = create_one(connection, Session(session_id="imported", opened_by=IMPORT))
        found["before again"] = create_one(connection, Session(session_id="before"))
        serving.fail_version(connection, 1, "worse")
        found["after"] = create_one(connection, Session(session_id="after"))
        found["during again"] = create_one(connection, Session(session_id="during"))
        for session in found.values():
            assert read_session(connection, "default", session.session_id).arm == session.arm
    assert {name for name, session in found.items() if session.arm == 1} == {"during", "during again", "judged"}
    assert all(session.arm in (None, 1) for session in found.values())
