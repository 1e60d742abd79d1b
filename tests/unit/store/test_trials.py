"""Which sessions a trial takes: the transaction that creates a session decides it, on both databases."""

from __future__ import annotations

import sqlalchemy as sa

from turnwise.store import arms, serving, versions
from turnwise.store.database import Database
from turnwise.store.sessions import create_session, read_session
from turnwise.types import IMPORT, PolicyVersion, Session, Split


def create_one(conn: sa.Connection, session: Session) -> Session:
    return create_session(conn, session)[0]


def sessions(count: int) -> list[Session]:
    return [Session(session_id=f"s{number}") for number in range(count)]


def test_a_trial_gets_its_share_of_new_sessions_and_always_the_same_ones():
    """Of 10,000 a share of 0.2 is 2,000 ± 40 (one standard deviation); the tolerance is five of them."""
    taken = [arms.takes(7, 0.2, session) for session in sessions(10_000)]
    assert abs(sum(taken) - 2000) < 200
    assert taken == [arms.takes(7, 0.2, session) for session in sessions(10_000)]


def test_another_version_is_tried_by_other_sessions():
    """Of independent draws of 0.2 each, 0.04 are in both: 400 of 10,000, ± 20."""
    both = [arms.takes(7, 0.2, session) and arms.takes(8, 0.2, session) for session in sessions(10_000)]
    assert abs(sum(both) - 400) < 100


def test_only_sessions_that_are_created_while_a_trial_runs_are_in_it(database: Database) -> None:
    """A trial that is only prepared takes none; what a session was assigned to stays."""
    found = {}
    with database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=1, path="/1"))
        found["before"] = create_one(connection, Session(session_id="before"))
        serving.try_version(connection, 1, None)
        found["prepared"] = create_one(connection, Session(session_id="prepared"))
        serving.try_version(connection, 1, 1.0)
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
