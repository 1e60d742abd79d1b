"""The statements that append a batch of turns."""

from __future__ import annotations

import pytest

from turnwise.store import ledger
from turnwise.store.database import Database
from turnwise.types import Session, Turn


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_batch_of_turns_sends_statements_for_many_rows(database: Database, dialect: str) -> None:
    """Seven turns are split into 4, 2 and 1.

    There are three statements each for the sessions, the parents, the ids, the new rows and the sessions' counts.
    """
    names = [str(number) for number in range(7)]
    sent: list[str] = []
    with database.write() as connection:
        for name in names:
            ledger.create_session(connection, Session(session_id=name))
        ledger.append_turns(
            connection, [Turn(turn_id=f"first {name}", session_id=name, chain_id=f"first {name}") for name in names]
        )
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.set_trace_callback(sent.append)
        added = ledger.append_turns(
            connection,
            [
                Turn(turn_id=f"next {name}", session_id=name, parent_turn_id=f"first {name}", chain_id="")
                for name in names
            ],
        )
        driver.set_trace_callback(None)
    assert len(sent) == 15
    assert [(turn.seq, turn.chain_id) for turn in added] == [(1, f"first {name}") for name in names]
