"""Opening the sessions of calls, on both databases: the same as creating each of them, in few statements."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.ledger_samples import add_session

from turnwise.errors import Conflict
from turnwise.store import ledger, opening, queries, tables
from turnwise.store.database import Database
from turnwise.store.rows import TURNS, dump, turn_row
from turnwise.types import Session, Split, Turn


def test_each_session_is_stored_as_if_it_were_created_alone(database: Database) -> None:
    """New ones, one that exists, one twice in the batch, one of a group, one for evaluation, and a refused one."""
    add_session(database, "known", turns=1)
    add_session(database, "first", group_id="taken", turns=0)
    fields = {"opened_by": "call", "metadata": {"näme": ["\ud800", "\0"]}, "sampling": {"temperature": 1e-05}}
    new = [Session(session_id=name, **fields) for name in ("new", "also_new", "new")]
    others = [
        Session(session_id="known"),
        Session(session_id="taken"),
        Session(session_id="grouped", group_id="g", group_size=2),
        Session(session_id="judged", split=Split.EVAL),
        Session(session_id="new", tenant="other"),
    ]
    with database.write() as connection:
        opened = opening.open_sessions(connection, [*new, *others])
    refused = opened.pop(4)
    assert isinstance(refused, Conflict)
    assert [created for _, created in opened] == [True, True, False, False, True, True, True]
    with database.read() as connection:
        for session, _ in opened:
            assert session == queries.session(connection, session.tenant, session.session_id)
        assert opened[0][0] == dataclasses.replace(new[0], last_active_at=new[0].created_at)
        of_tenant = tables.groups.select().where(tables.groups.c.tenant == "default")
        groups = {row.group_id: row for row in connection.execute(of_tenant)}
    assert sorted(groups) == ["also_new", "g", "known", "new", "taken"]
    assert (groups["new"].group_size, groups["new"].num_sessions, groups["g"].group_size) == (1, 1, 2)


def test_processes_that_open_the_same_sessions_at_once_create_each_once(database: Database) -> None:
    barrier = threading.Barrier(4)
    names = [f"s{number}" for number in range(12)]

    def open_all(worker: int) -> int:
        barrier.wait(60)
        order = names if worker % 2 else names[::-1]
        with database.write() as connection:
            opened = opening.open_sessions(connection, [Session(session_id=name) for name in order])
        return sum(created for _, created in opened)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(open_all, range(4), timeout=60)) == len(names)
    with database.read() as connection:
        assert queries.counts(connection).groups == {"open": len(names)}


@pytest.mark.parametrize("dialect", ["sqlite"])
@pytest.mark.parametrize(("num_sessions", "num_statements"), [(8, 4), (16, 4), (7, 10), (31, 16)])
def test_opening_many_sessions_sends_few_statements(
    database: Database, dialect: str, num_sessions: int, num_statements: int
) -> None:
    """One for the trial; a select and two inserts for each power of two, of which 7 has three and 31 has five."""
    sent: list[str] = []
    with database.write() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.set_trace_callback(sent.append)
        opening.open_sessions(connection, [Session(session_id=str(number)) for number in range(num_sessions)])
        driver.set_trace_callback(None)
    assert len(sent) == num_statements


def test_a_document_is_stored_as_the_same_text_whatever_encodes_it() -> None:
    """The texts that `json` writes, with floats, characters beyond ASCII, DEL, long integers and deep nesting."""
    deep: list = []
    for _ in range(300):
        deep = [deep]
    texts = {
        '[{"a":"b\\n\\"/\\\\","c":[1,true,null]}]': [{"a": 'b\n"/\\', "c": [1, True, None]}],
        "[1e-05,1e+16]": [1e-05, 1e16],
        '"\\u00e4\\ud83d\\ude00"': "ä\N{GRINNING FACE}",
        '"\\u007f\\u0000"': "\x7f\0",
        "1180591620717411303424": 2**70,
        '"\\ud800"': "\ud800",
        "[" * 301 + "]" * 301: deep,
    }
    assert {dump(document) for document in texts.values()} == set(texts)


def test_the_session_of_a_call_is_the_one_that_the_api_created(database: Database) -> None:
    with database.write() as connection:
        stored, _ = ledger.create_session(connection, Session(session_id="s", task_id="kim"))
        assert opening.open_sessions(connection, [Session(session_id="s", opened_by="call")]) == [(stored, False)]


def test_a_turns_documents_are_encoded_at_once_if_they_are_ascii_and_all_of_them_when_it_is_stored() -> None:
    """The others are sent to the writing process as they are: encoding them takes longer. Free text is repaired.

    A turn that is read and stored again has the same texts, also where a float has an exponent.
    """
    texts = ["plain", "ä", "\x7f\0", "\ud800"]
    turn = Turn(
        turn_id="t",
        session_id="s",
        chain_id="t",
        model="m\0",
        messages=[{"role": "user", "content": texts[0]}],
        response={"content": texts[1], "reasoning": texts[2]},
        tools=[{"name": texts[3]}],
        sampling={"temperature": 0.5, "top_p": 1e-05},
    )
    row = TURNS.row(turn)
    assert (row["model"], row["messages"]) == ("m\N{REPLACEMENT CHARACTER}", '[{"role":"user","content":"plain"}]')
    assert (row["response"], row["tools"]) == (turn.response, turn.tools)
    stored = turn_row(turn, 1)
    assert stored["response"] == '{"content":"\\u00e4","reasoning":"\\u007f\\u0000"}'
    assert stored["tools"] == '[{"name":"\\ud800"}]'
    read = dataclasses.replace(turn, **{name: json.loads(stored[name]) for name in TURNS.documents})
    assert turn_row(read, 1) == stored
