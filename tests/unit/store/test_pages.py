"""Pages of lists: they end at a number of bytes, and the next one goes on where they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.ledger_samples import add_session, finish, update_record

from turnwise.store import claims, search, sessions, turns, updates, versions
from turnwise.store.database import Connection, Database
from turnwise.store.selection import SessionFilter
from turnwise.types import PolicyVersion

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
    found, has_more = updates.list_update_views(conn, "default", limit=9, after=after, max_bytes=max_bytes)
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
def filled(database: Database) -> Database:
    """Four sessions, of four turns each, four updates and four versions, each of 10,000 bytes or more."""
    for number in range(1, 5):
        add_session(database, f"s{number}", turns=4, metadata={"text": TEXT})
        finish(database, f"s{number}")
        claimed = claims.claim(database, "t", max_groups=1, lease_seconds=60)
        assert claimed is not None
        record = update_record(number, metrics={"text": TEXT})
        with database.write() as connection:
            claims.ack(connection, claimed, record, trained={})
            versions.publish_version(
                connection, PolicyVersion(version=9 + number, path=f"/{number}", metrics={"t": TEXT})
            )
    return database


@pytest.mark.parametrize("name", PAGES)
def test_a_page_ends_at_its_bytes_and_the_next_goes_on(filled: Database, name: str) -> None:
    read = PAGES[name]
    with filled.read() as connection:
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
