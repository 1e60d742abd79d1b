"""Migrations: up and down, twice, and always equal to the declared tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from support.dialects import QUICK_ON_SQLITE

from turnwise.errors import SchemaMismatch
from turnwise.store import tables
from turnwise.store.compatibility import find_obstacles
from turnwise.store.database import Database, alembic_config

REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
"""All of them, oldest first."""


def test_every_revision_goes_up_and_down_twice(empty_database_url: str) -> None:
    database = Database(empty_database_url)
    for _ in range(2):
        for revision in REVISIONS:
            database.upgrade(revision)
        database.check_schema()
        for revision in ["base", *REVISIONS[:-1]][::-1]:
            database.downgrade(revision)
        with pytest.raises(SchemaMismatch, match=r"has no Turnwise tables.*turnwise db upgrade"):
            database.check_schema()
    database.close()


def test_the_migrated_tables_are_those_that_the_code_declares(database: Database) -> None:
    """Types, nullability, indexes and constraints; an empty difference."""
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_the_comparison_detects_a_missing_column(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE policies DROP COLUMN error")
        difference = compare_metadata(MigrationContext.configure(connection), tables.metadata)
    assert [(change[0], change[3].name) for change in difference] == [("add_column", "error")]


def test_an_upgrade_of_a_current_database_changes_nothing(database: Database) -> None:
    database.upgrade()
    database.check_schema()


def test_processes_that_upgrade_at_once_take_turns(empty_database_url: str) -> None:
    program = "import sys; from turnwise.store.database import Database; Database(sys.argv[1]).upgrade()"
    root = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen([sys.executable, "-c", program, empty_database_url], cwd=root, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    database = Database(empty_database_url)
    database.check_schema()
    database.close()


def test_a_new_sqlite_file_gets_its_tables_and_on_postgresql_the_error_names_the_command(
    empty_database_url: str,
) -> None:
    database = Database(empty_database_url)
    if database.dialect == "sqlite":
        assert database.prepare()
        database.check_schema()
        assert not database.prepare()
    else:
        with pytest.raises(SchemaMismatch, match="turnwise db upgrade"):
            database.prepare()
    database.close()


def test_an_sqlite_file_of_an_older_release_is_migrated(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/old.db")
    database.upgrade(REVISIONS[0])
    assert database.prepare() == (len(REVISIONS) > 1)
    database.check_schema()
    database.close()


@pytest.mark.parametrize(
    ("change", "is_usable"),
    [
        ("ALTER TABLE sessions ADD COLUMN later TEXT", True),
        ("ALTER TABLE sessions ADD COLUMN later TEXT NOT NULL DEFAULT ''", True),
        ("CREATE TABLE later (name TEXT NOT NULL)", True),
        ("ALTER TABLE policies DROP COLUMN error", False),
        ("DROP TABLE trainer_status", False),
    ],
)
def test_tables_of_a_newer_release_are_used_if_they_only_add_and_are_never_changed(
    database: Database, change: str, *, is_usable: bool
) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
        connection.exec_driver_sql(change)
    if is_usable:
        assert not database.prepare()
        database.check_schema()
    else:
        for check in (database.prepare, database.check_schema):
            with pytest.raises(SchemaMismatch, match=r"newer release.*'9999'.*cannot use"):
                check()
    with pytest.raises(SchemaMismatch, match="newer release"):
        database.upgrade()


@QUICK_ON_SQLITE
def test_a_release_can_use_the_tables_of_every_later_release(empty_database_url: str) -> None:
    """Each migration keeps all columns, and every new column of an old table may be null or has a default."""
    database = Database(empty_database_url)
    declared = []
    for revision in REVISIONS:
        database.upgrade(revision)
        with database.read() as connection:
            metadata = sa.MetaData()
            metadata.reflect(connection)
            declared.append((revision, metadata))
            obstacles = {older: find_obstacles(connection, columns) for older, columns in declared}
        assert not any(obstacles.values()), (revision, obstacles)
    database.close()


def test_a_new_column_that_requires_a_value_is_an_obstacle(database: Database) -> None:
    with database.read() as connection:
        older = sa.MetaData()
        sa.Table("secrets", older, sa.Column("name", sa.Text), sa.Column("colour", sa.Text))
        assert find_obstacles(connection, older) == [
            "the column secrets.colour is missing",
            "the column secrets.value is unknown and requires a value",
        ]


def test_another_programs_sqlite_file_gets_no_tables(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/other.db")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE songs (title TEXT)")
    with pytest.raises(SchemaMismatch, match="none of Turnwise"):
        database.prepare()
    database.close()
