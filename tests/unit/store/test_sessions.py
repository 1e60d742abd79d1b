"""Sessions that calls open, and a second creation, which applies changes that are still possible and refuses others."""

import dataclasses
import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish, groups_by_status
from support.waiting import WAIT_SECONDS

from turnwise.errors import Conflict
from turnwise.store import schema, sessions
from turnwise.store.database import Database, IdleClock
from turnwise.types import Credit, Session, Split


def change(database: Database, **fields: Any) -> Session:
    with database.write() as connection:
        return sessions.change_session(connection, Session(session_id="s", **fields), set(fields))


def groups_of(database: Database) -> dict[str, tuple[int | None, int]]:
    with database.read() as connection:
        found = connection.execute(sa.select(schema.groups))
        return {row.group_id: (row.group_size, row.num_sessions) for row in found}


def test_a_session_that_a_call_opened_accepts_a_group_and_credit_afterwards(database):
    add_session(database, "s")
    add_session(database, "other", group_id="g", group_size=2)
    changed = change(database, group_id="g", group_size=2, credit=Credit.STEP_WISE, gamma=0.5, sampling={"top_p": 0.9})
    assert (changed.group_id, changed.credit, changed.gamma) == ("g", Credit.STEP_WISE, 0.5)
    assert changed.sampling == {"top_p": 0.9}
    assert groups_of(database) == {"g": (2, 2)}  # its own group of one is gone
    finish(database, "s")
    finish(database, "other")
    assert groups_by_status(database) == {"ready": 1}


def test_a_session_is_excluded_from_training_and_included_again(database):
    add_session(database, "s")
    assert change(database, split=Split.EVAL).split is Split.EVAL
    assert groups_of(database) == {}
    assert change(database, split=Split.TRAIN).split is Split.TRAIN
    assert groups_of(database) == {"s": (1, 1)}


def test_a_group_without_a_size_accepts_one_later(database):
    add_session(database, "s", group_id="g")
    change(database, group_id="g", group_size=1)
    assert groups_of(database) == {"g": (1, 1)}


def test_a_change_that_is_no_longer_possible_is_a_conflict_and_changes_nothing(database):
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


def test_each_session_is_stored_as_if_it_were_created_alone(database):
    """New ones, one that exists, one twice in the batch, one of a group, one for evaluation, and a refused one."""
    add_session(database, "known", turns=1)
    add_session(database, "first", group_id="taken", turns=0)
    fields = {"opened_by": "call", "metadata": {"näme": ["\ud800", "\0"]}, "sampling": {"temperature": 1e-05}}
    fields |= {"task_id": "t", "run": 3, "credit": Credit.STEP_WISE, "gamma": 0.9}
    new = [Session(session_id=name, **fields) for name in ("new", "also_new", "new")]
    others = [
        Session(session_id="known"),
        Session(session_id="taken"),
        Session(session_id="grouped", group_id="g", group_size=2),
        Session(session_id="judged", split=Split.EVAL),
        Session(session_id="new", tenant="other", task_id="u"),
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


def test_processes_that_open_the_same_sessions_at_once_create_each_once(database):
    barrier = threading.Barrier(4)
    names = [f"s{number}" for number in range(12)]

    def open_all(worker: int) -> int:
        barrier.wait(WAIT_SECONDS)
        order = names if worker % 2 else names[::-1]
        with database.write() as connection:
            wanted = [Session(session_id=name) for name in order]
            opened = sessions.create_sessions(connection, [*wanted, Session(session_id="of_g", group_id="g")])
        return sum(created for _, created in opened)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(open_all, range(4), timeout=WAIT_SECONDS)) == len(names) + 1
    with database.read() as connection:
        groups = {row.group_id: row.num_sessions for row in connection.execute(schema.groups.select())}
    assert groups == dict.fromkeys([*names, "g"], 1)


def test_a_corrected_clock_read_no_later_an_hour_ago_than_it_may_have(monkeypatch):
    """It reads 12:00 at second 100, jumps three hours ahead, as when a virtual machine resumes, and is set back."""
    noon, hour = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC), datetime.timedelta(hours=1)
    clock = IdleClock(hour)

    def an_hour_ago(second: int, reads: datetime.timedelta) -> datetime.timedelta:
        monkeypatch.setattr("turnwise.store.database.monotonic", lambda: second)
        return clock.earliest(noon + reads, hour) - noon

    seconds = datetime.timedelta(seconds=1)
    assert an_hour_ago(100, 0 * hour) == -hour
    assert an_hour_ago(110, 3 * hour + 10 * seconds) == -hour + 10 * seconds
    assert an_hour_ago(120, 20 * seconds) == -hour + 20 * seconds
    assert an_hour_ago(3720, hour + 20 * seconds) == 20 * seconds
    assert an_hour_ago(3730, 4 * hour + 30 * seconds) == 30 * seconds
    assert an_hour_ago(7331, 5 * hour + 31 * seconds) == 4 * hour + 31 * seconds
