"""Forks: sessions that begin with copies of another session's turns, made in short transactions."""

from __future__ import annotations

import pytest
from support.ledger_samples import add_session, make_turn

from turnwise.errors import Conflict
from turnwise.store import forks, ledger, queries
from turnwise.store.database import Database
from turnwise.types import Session


def fork(database: Database, turn_id: str, session_id: str = "fork", *, before: bool = False) -> list[int]:
    """Fork a turn; return the number of turns that the fork has after each transaction."""
    sizes, is_complete = [], False
    while not is_complete:
        with database.write() as connection:
            stored, is_complete = forks.fork_session(connection, Session(session_id=session_id), turn_id, before=before)
        sizes.append(stored.num_turns)
    return sizes


def test_a_long_path_is_copied_in_slices_and_each_turn_once(database: Database) -> None:
    add_session(database, turns=45)
    add_session(database, "other")
    assert fork(database, "s-t44") == [20, 40, 44]
    assert fork(database, "s-t44") == [44]
    assert fork(database, "s-t45", "again", before=True) == [20, 40, 44]
    with database.read() as connection:
        original, _ = queries.turns(connection, "default", "s", limit=44)
        copies, _ = queries.turns(connection, "default", "fork", limit=None)
    assert [view.prompt_token_ids.tolist() for view in copies] == [view.prompt_token_ids.tolist() for view in original]
    assert {(view.turn.outcome.value, view.turn.reason) for view in copies} == {("untrainable", "forked")}
    with pytest.raises(Conflict, match="'other' exists and is no fork of turn 's-t2'"):
        fork(database, "s-t2", "other")


def test_a_fork_that_was_cut_off_goes_on_where_it_ended(database: Database) -> None:
    add_session(database, turns=30)
    with database.write() as connection:
        assert not forks.fork_session(connection, Session(session_id="fork"), "s-t30", before=False)[1]
    assert fork(database, "s-t30") == [30]


def test_large_turns_are_copied_one_by_one(database: Database) -> None:
    with database.write() as connection:
        ledger.create_session(connection, Session(session_id="s"))
        first = make_turn("t1", messages=[{"role": "user", "content": "x" * (forks.SLICE_BYTES + 1)}])
        second = make_turn("t2", first, messages=[{"role": "user", "content": "x" * forks.SLICE_BYTES}])
        ledger.append_turns(connection, [first, second])
    assert fork(database, "t2") == [1, 2]
