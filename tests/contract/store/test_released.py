"""Databases of released versions come to this one with all that is in them, and their migrations stay as they were."""

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from released.doors import answered, answers, migrate, releases, restore, revision_of

from turnwise import __version__
from turnwise.store.database import Database
from turnwise.store.schema import metadata

PARTS = ("columns", "indexes", "pk_constraint", "unique_constraints", "foreign_keys", "check_constraints")


def lost(then: Any, now: Any, place: str = "") -> list[str]:
    """Return where what was answered then is not answered any more; there may be more fields now."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [line for name in then for line in lost(then[name], now.get(name), f"{place}.{name}")]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [line for number, each in enumerate(then) for line in lost(each, now[number], f"{place}[{number}]")]
    return [] if then == now else [f"{place}: {then!r}, now {now!r}"]


def described(conn: sa.Connection) -> dict[tuple[str, str], Any]:
    """Return all that the database says of its tables, in any order."""
    inspector = sa.inspect(conn)
    return {
        (part, name): sorted(map(in_words, found)) if isinstance(found, list) else in_words(found)
        for part in PARTS
        for (_, name), found in getattr(inspector, f"get_multi_{part}")().items()
        if name != "alembic_version"
    }


def in_words(found: Any) -> str:
    return json.dumps(found, sort_keys=True, default=str)


@pytest.mark.parametrize("release", releases())
def test_a_released_database_comes_over_and_every_public_door_answers_as_it_did(release, empty_database_url, tmp_path):
    restore(release, empty_database_url, tmp_path)
    database = Database(empty_database_url)
    with database.read() as conn:
        found = sa.MetaData()
        found.reflect(conn)
        filled = {table.name for table in found.sorted_tables if conn.execute(sa.select(table).limit(1)).first()}
    assert filled == found.tables.keys(), "the release has left rows in each of its tables"
    database.upgrade()
    database.check_schema()
    then = answered(release)
    assert lost(then["answers"], answers(empty_database_url, then["key"], tuple(then["answers"]))) == []
    database.close()


@pytest.mark.parametrize("release", releases())
def test_a_released_migration_makes_what_it_made_then(release, tmp_path):
    restore(release, f"sqlite:///{tmp_path}/then.db", tmp_path)
    then, now = Database(f"sqlite:///{tmp_path}/then.db"), Database(f"sqlite:///{tmp_path}/now.db")
    with then.read() as conn:
        revision = revision_of(conn)
    with now.write() as conn:
        migrate(conn, revision)
    for database in (then, now):
        database.close()
    assert declared(f"{tmp_path}/then.db") == declared(f"{tmp_path}/now.db")


def declared(file: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()


def test_this_release_has_left_a_database():
    assert __version__ in releases(), "run `make release-fixture`"


def test_all_migrations_make_the_tables_that_the_code_declares(database, empty_database_url):
    """A table or column that is declared without a migration fails here: before 0.2.0, run `make release-fixture`."""
    declared = Database(empty_database_url)
    with declared.write() as conn:
        metadata.create_all(conn)
    with declared.read() as made, database.read() as migrated:
        assert described(migrated) == described(made)
    declared.close()
