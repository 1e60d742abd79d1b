"""Opening the sessions of calls, on both databases: the same as creating each of them, in few statements."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

from support.ledger_samples import add_session

from turnwise.errors import Conflict
from turnwise.store import schema, sessions
from turnwise.store.database import Database
from turnwise.types import Session, Split


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
        opened = sessions.create_sessions(connection, [*new, *others])
    refused = opened.pop(4)
    assert isinstance(refused, Conflict)
    assert [created for _, created in opened] == [True, True, False, False, True, True, True]
    with database.read() as connection:
        for session, _ in opened:
            assert session == sessions.read_session(connection, session.tenant, session.session_id)
        assert opened[0][0] == dataclasses.replace(new[0], last_active_at=new[0].created_at)
        of_tenant = schema.groups.select().where(schema.groups.c.tenant == "default")
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
            wanted = [Session(session_id=name) for name in order]
            opened = sessions.create_sessions(connection, [*wanted, Session(session_id="of_g", group_id="g")])
        return sum(created for _, created in opened)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(open_all, range(4), timeout=60)) == len(names) + 1
    with database.read() as connection:
        groups = {row.group_id: row.num_sessions for row in connection.execute(schema.groups.select())}
    assert groups == dict.fromkeys([*names, "g"], 1)
