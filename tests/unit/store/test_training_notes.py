"""The note on training in the answer to a session's end."""

from __future__ import annotations

import pytest
from support.ledger_samples import add_session, finish, update_record

from turnwise.store import claims, groups, sessions
from turnwise.store.database import Database
from turnwise.types import Split


def note(database: Database, session_id: str = "s") -> str:
    with database.read() as connection:
        return groups.describe_training(connection, sessions.read_session(connection, "default", session_id))


@pytest.mark.parametrize("fields", [{}, {"group_id": "g", "group_size": 1}], ids=["no group", "a group of one"])
def test_the_note_of_a_single_session_states_what_will_be_done_with_it(
    database: Database, fields: dict[str, str | int]
) -> None:
    add_session(database, **fields)
    assert note(database).startswith("It has no reward yet: post one to `/v1/rewards`. It will be trained as a single")
    finish(database)
    assert note(database).startswith("It is a single session and waits for the trainer")
    assert note(database).endswith("compared with those of other single sessions of the same agent.")
    held = claims.claim(database, "t", max_groups=1, lease_seconds=60)
    assert held is not None
    with database.write() as connection:
        update = update_record(1, policy_version=0, num_groups=0, num_sessions=0, num_tokens=0)
        claims.ack(connection, held, update, refused={held.groups[0].key: "uniform_rewards"})
    assert note(database).startswith("It is a single session and was not trained: uniform_rewards.")


def test_the_note_of_a_session_is_about_the_group_of_its_own_tenant(database: Database) -> None:
    add_session(database, group_id="g", group_size=2)
    add_session(database, "other", tenant="another", group_id="g", group_size=3)
    assert note(database).startswith("It has no reward yet: post one to `/v1/rewards`. Group 'g' has 0 of 2 sessions")
    with database.read() as connection:
        theirs = sessions.read_session(connection, "another", "other")
        assert "Group 'g' has 0 of 3 sessions" in groups.describe_training(connection, theirs)


def test_the_note_of_a_group_states_how_many_sessions_are_finished_until_it_is_ready(database: Database) -> None:
    for session_id in ("a", "b"):
        add_session(database, session_id, group_id="g", group_size=2)
    finish(database, "a")
    assert note(database, "a") == "Group 'g' has 1 of 2 sessions that are over and have a reward. Missing: 1 not ended."
    finish(database, "b")
    assert note(database, "b") == "Group 'g' is ready."


def test_the_note_of_a_group_without_a_size_states_when_it_closes(database: Database) -> None:
    add_session(database, group_id="g")
    finish(database)
    assert "has no `group_size`" in note(database)


def test_the_note_of_an_eval_session_states_that_it_is_not_trained(database: Database) -> None:
    add_session(database, split=Split.EVAL)
    finish(database)
    assert note(database) == "A session of split `eval` is not trained."
