"""Search in what sessions hold: each condition, the bounds of one search, and how it continues."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ledger_samples import add_finished, make_turn, update_record
from support.migrated import migrated
from support.private_postgres import PrivatePostgres

from turnwise.features.page import search
from turnwise.features.page import updates as page_updates
from turnwise.features.page.search import Contents, search_sessions
from turnwise.store import claims, rewards, sessions, turns, versions
from turnwise.store.database import Connection, Database
from turnwise.store.selection import SessionFilter
from turnwise.types import Outcome, PolicyVersion, Reward, Session, Turn

HERE = SessionFilter(tenant="default")
CALL = {"function": {"name": "find", "arguments": '{"city": "S\u00e3o Paulo"}'}}
SESSIONS: list[tuple[str, Turn, float | None]] = [
    ("a", make_turn("t1", response={"role": "assistant", "content": "The answer is 50% of it."}), 0.0),
    ("b", make_turn("t2", outcome=Outcome.UNTRAINABLE, reason="media", policy_version_last=3), 0.5),
    ("c", make_turn("t3", messages=[{"role": "user", "content": 'שלום "quoted" 🙂'}]), 1.0),
    ("d", make_turn("t4", response={"role": "assistant", "tool_calls": [CALL]}), None),
]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Four sessions with one turn each, oldest first, and a session of another tenant with all their text.

    The tests of this module only read, so they share one store for each kind of database.
    """
    if request.param == "sqlite":
        url = migrated(f"sqlite:///{tmp_path_factory.mktemp('search')}/turnwise.db")
    else:
        server: PrivatePostgres = request.getfixturevalue("postgres_server")
        url = server.url(server.create_database(request.getfixturevalue("postgres_template")))
    database = Database(url, lock_timeout_seconds=60)
    fill(database)
    yield database
    database.close()


def fill(database: Database) -> None:
    with database.write() as conn:
        for session_id, turn, reward in SESSIONS:
            sessions.create_session(conn, Session(session_id=session_id))
            turns.append_turns(conn, [dataclasses.replace(turn, session_id=session_id)])
            if reward is not None:
                rewards.add_rewards(conn, [Reward(session_id=session_id, value=reward)])
        sessions.end_session(conn, "default", "a", "solved")
        sessions.create_session(conn, Session(session_id="x", tenant="other"))
        turns.append_turns(conn, [make_turn("t9", session_id="x", tenant="other")])


@pytest.mark.parametrize(
    ("contents", "found"),
    [
        (Contents(), "dcba"),
        (Contents(min_reward=0.5), "cb"),
        (Contents(max_reward=0.5), "ba"),
        (Contents(min_reward=0.1, max_reward=0.9), "b"),
        (Contents(termination_reason="solved"), "a"),
        (Contents(outcome=Outcome.UNTRAINABLE), "b"),
        (Contents(outcome=Outcome.EXACT), "dca"),
        (Contents(reason="media"), "b"),
        (Contents(policy_version=2), "b"),
        (Contents(policy_version=0), "dcba"),
        (Contents(text="ANSWER IS"), "a"),
        (Contents(text="50% of"), "a"),
        (Contents(text="50_ of"), ""),
        (Contents(text="שלום"), "c"),
        (Contents(text='"quoted"'), "c"),
        (Contents(text="🙂"), "c"),
        (Contents(text='"city": "São'), "d"),
        (Contents(text="question 2", outcome=Outcome.EXACT), ""),
    ],
)
def test_each_condition_selects_the_sessions_that_satisfy_it(filled, contents, found):
    with filled.read() as conn:
        result = search_sessions(conn, HERE, contents)
    assert "".join(each.session_id for each in result.sessions) == found
    assert (result.next_after, result.num_searched) == (None, 4)


def test_a_page_continues_where_it_stopped_until_the_end(filled, monkeypatch):
    monkeypatch.setattr(search, "WINDOW", 2)
    with filled.read() as conn:
        first = search_sessions(conn, HERE, Contents(min_reward=0.0), limit=2)
        assert [each.session_id for each in first.sessions] == ["c", "b"]
        assert (first.next_after, first.num_searched) == ("b", 3)
        second = search_sessions(conn, HERE, Contents(min_reward=0.0), limit=2, after="b")
        assert ([each.session_id for each in second.sessions], second.next_after) == (["a"], None)
        exact = search_sessions(conn, HERE, Contents(min_reward=0.0), limit=1, after="b")
        assert exact.next_after is None


@pytest.mark.parametrize(("name", "bound"), [("MAX_SEARCHED", 2), ("MAX_SECONDS", -1.0)])
def test_one_search_is_bounded_and_returns_where_it_stopped(filled, monkeypatch, name, bound):
    monkeypatch.setattr(search, "WINDOW", 2)
    monkeypatch.setattr(search, name, bound)
    with filled.read() as conn:
        stopped = search_sessions(conn, HERE, Contents(termination_reason="solved"))
        assert (stopped.sessions, stopped.next_after, stopped.num_searched) == ([], "c", 2)
        rest = search_sessions(conn, HERE, Contents(termination_reason="solved"), after="c")
    assert ([each.session_id for each in rest.sessions], rest.next_after) == (["a"], None)


TEXT = "x" * 10_000
WANTED = SessionFilter(tenant="default")

Page = Callable[[Connection, Any, int], tuple[list[Any], Any]]
"""Returns the ids of a page after an id, which is at most so large, and the id that the next page is after."""


def _sessions(conn: Connection, after: Any, max_bytes: int) -> tuple[list[Any], Any]:
    found, has_more = sessions.list_sessions(conn, WANTED, limit=9, after=after, max_bytes=max_bytes)
    return [each.session_id for each in found], found[-1].session_id if has_more else None


def _searched(conn: Connection, after: Any, max_bytes: int) -> tuple[list[Any], Any]:
    found = search.search_sessions(
        conn, WANTED, search.Contents(min_reward=0.0), limit=9, after=after, max_bytes=max_bytes
    )
    return [each.session_id for each in found.sessions], found.next_after


def _turns(*, whole: bool) -> Page:
    def read(conn: Connection, after: Any, max_bytes: int) -> tuple[list[Any], Any]:
        found, has_more = turns.read_turns(
            conn, "default", "s1", limit=9, after=after, whole_prompt=whole, max_bytes=max_bytes
        )
        return [each.turn.turn_id for each in found], found[-1].turn.turn_id if has_more else None

    return read


def _updates(conn: Connection, after: Any, max_bytes: int) -> tuple[list[Any], Any]:
    found, has_more = page_updates.list_update_views(conn, "default", limit=9, after=after, max_bytes=max_bytes)
    ids = [each.update.update_id for each in found]
    return ids, ids[-1] if has_more else None


def _policies(conn: Connection, after: Any, max_bytes: int) -> tuple[list[Any], Any]:
    found, has_more = versions.list_versions(conn, limit=9, after=after, max_bytes=max_bytes)
    return [each.version for each in found], found[-1].version if has_more else None


PAGES: dict[str, Page] = {
    "sessions": _sessions,
    "found sessions": _searched,
    "turns": _turns(whole=False),
    "turns with whole prompts": _turns(whole=True),
    "updates": _updates,
    "policies": _policies,
}


@pytest.fixture
def paged(database: Database) -> Database:
    """Four sessions, of four turns each, four updates and four versions, each of 10,000 bytes or more."""
    for number in range(1, 5):
        add_finished(database, f"s{number}", turns=4, metadata={"text": TEXT})
        claimed = claims.claim(database, "t", max_groups=1, lease_seconds=60)
        record = update_record(number, metrics={"text": TEXT})
        with database.write() as connection:
            claims.ack(connection, claims.Finished(claimed, record, trained={}))
            versions.publish_version(
                connection, PolicyVersion(version=9 + number, path=f"/{number}", metrics={"t": TEXT})
            )
    return database


@pytest.mark.parametrize("name", PAGES)
def test_a_page_ends_at_its_bytes_and_the_next_goes_on(paged, name):
    read = PAGES[name]
    with paged.read() as connection:
        every, after = read(connection, None, 10**9)
        assert after is None
        paged, sizes, after = [], [], None
        while not sizes or after is not None:
            page, after = read(connection, after, 1)
            paged += page
            sizes.append(len(page))
    assert len(every) >= 4
    assert paged == every
    assert set(sizes) == {1}  # one row, however large
