"""A second creation of a session applies changes that are still possible and refuses the others."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish, groups_by_status

from turnwise.errors import Conflict
from turnwise.store import schema, sessions
from turnwise.store.database import Database
from turnwise.types import Credit, Session, Split


def change(database: Database, **fields: Any) -> Session:
    with database.write() as connection:
        return sessions.change_session(connection, Session(session_id="s", **fields), set(fields))


def groups_of(database: Database) -> dict[str, tuple[int | None, int]]:
    with database.read() as connection:
        found = connection.execute(sa.select(schema.groups))
        return {row.group_id: (row.group_size, row.num_sessions) for row in found}


def test_a_session_that_a_call_opened_accepts_a_group_and_credit_afterwards(database: Database) -> None:
    add_session(database, "s")
    add_session(database, "other", group_id="g", group_size=2)
    changed = change(database, group_id="g", group_size=2, credit=Credit.STEP_WISE, gamma=0.5, sampling={"top_p": 0.9})
    assert (changed.group_id, changed.credit, changed.gamma) == ("g", Credit.STEP_WISE, 0.5)
    assert changed.sampling == {"top_p": 0.9}
    assert groups_of(database) == {"g": (2, 2)}  # its own group of one is gone
    finish(database, "s")
    finish(database, "other")
    assert groups_by_status(database) == {"ready": 1}


def test_a_session_is_excluded_from_training_and_included_again(database: Database) -> None:
    add_session(database, "s")
    assert change(database, split=Split.EVAL).split is Split.EVAL
    assert groups_of(database) == {}
    assert change(database, split=Split.TRAIN).split is Split.TRAIN
    assert groups_of(database) == {"s": (1, 1)}


def test_a_group_without_a_size_accepts_one_later(database: Database) -> None:
    add_session(database, "s", group_id="g")
    change(database, group_id="g", group_size=1)
    assert groups_of(database) == {"g": (1, 1)}


def test_a_change_that_is_no_longer_possible_is_a_conflict_and_changes_nothing(database: Database) -> None:
    add_session(database, "s", group_id="g", group_size=2)
    with pytest.raises(Conflict, match=r"`group_id` can no longer change: it is in group 'g'"):
        change(database, group_id="h", gamma=0.5)
    with pytest.raises(Conflict, match="group 'g' has size 2, not 3"):
        change(database, group_size=3, gamma=0.5)
    finish(database, "s")
    with pytest.raises(Conflict, match=r"`credit`, `sampling` can no longer change: it is ended"):
        change(database, credit=Credit.STEP_WISE, sampling={"top_p": 0.9}, metadata={"a": 1})
    with database.read() as connection:
        stored = sessions.read_session(connection, "default", "s")
    assert (stored.group_id, stored.gamma, stored.credit, stored.metadata) == ("g", 0.0, Credit.PROPAGATE, {})
    assert change(database, metadata={"a": 1}).metadata == {"a": 1}
