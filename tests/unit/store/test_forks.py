"""Forks: sessions that begin with copies of another session's turns, made in short transactions."""

import pytest
from support.ledger_samples import add_session, make_turn

from turnwise.errors import Conflict, NotFound
from turnwise.features import forks, retention
from turnwise.store import sessions, turns
from turnwise.store.database import Database
from turnwise.types import Session


def fork(database: Database, turn_id: str, session_id: str = "fork", *, before: bool = False) -> list[int]:
    """Fork a turn; return the number of turns that the fork has after each transaction."""
    sizes, session = [], Session(session_id=session_id)
    with database.read() as connection:
        path, num_copied = forks.read_path(connection, session, turn_id, before=before)
    while True:
        some = path[num_copied : num_copied + forks.SLICE_TURNS]
        with database.write() as connection:
            stored, num_more = forks.copy_turns(connection, session, path[0], some)
        sizes.append(stored.num_turns)
        num_copied += num_more
        if num_copied == len(path):
            return sizes


def test_a_long_path_is_copied_in_slices_and_each_turn_once(database):
    add_session(database, turns=45)
    add_session(database, "other")
    assert fork(database, "s-t44") == [20, 40, 44]
    assert fork(database, "s-t44") == [44]
    assert fork(database, "s-t45", "again", before=True) == [20, 40, 44]
    with database.read() as connection:
        original, _ = turns.read_turns(connection, "default", "s", limit=44)
        copies, _ = turns.read_turns(connection, "default", "fork", limit=None)
    assert [view.prompt_token_ids.tolist() for view in copies] == [view.prompt_token_ids.tolist() for view in original]
    assert {(view.turn.outcome.value, view.turn.reason) for view in copies} == {("untrainable", "forked")}
    for name in ("other", "s"):
        with pytest.raises(Conflict, match=f"'{name}' exists and does not begin with a copy of turn 's-t1'"):
            fork(database, "s-t2", name)


def test_a_fork_that_was_cut_off_goes_on_where_it_ended(database):
    add_session(database, turns=30)
    with database.write() as connection:
        first = [f"s-t{number}" for number in range(1, 21)]
        assert forks.copy_turns(connection, Session(session_id="fork"), "s-t1", first)[1] == 20
    assert fork(database, "s-t30") == [30]


def test_large_turns_are_copied_one_by_one(database):
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id="s"))
        first = make_turn("t1", messages=[{"role": "user", "content": "x" * (forks.SLICE_BYTES + 1)}])
        second = make_turn("t2", first, messages=[{"role": "user", "content": "x" * forks.SLICE_BYTES}])
        turns.append_turns(connection, [first, second])
    assert fork(database, "t2") == [1, 2]


def test_a_fork_of_a_session_that_is_deleted_meanwhile_copies_nothing_more(database):
    """The turns are still stored, but not readable; what was copied before belongs to the fork and stays whole."""
    add_session(database, turns=30)
    path = [f"s-t{number}" for number in range(1, 31)]
    session = Session(session_id="fork")
    with database.write() as connection:
        forks.copy_turns(connection, session, path[0], path[:20])
        retention.delete_session(connection, "default", "s")
    with pytest.raises(NotFound, match="'s-t21' any more"), database.write() as connection:
        forks.copy_turns(connection, session, path[0], path[20:])
    with database.write() as connection:
        while retention.sweep(connection):
            pass
    with database.read() as connection:
        copies, _ = turns.read_turns(connection, "default", "fork")
    assert [len(view.prompt_token_ids) for view in copies] == [4 * number + 2 for number in range(20)]
