"""The database's history: up and down, twice, and always equal to what the code declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from turnwise.errors import SchemaMismatch
from turnwise.store import tables
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
        with pytest.raises(SchemaMismatch, match=r"at schema revision None.*turnwise db upgrade"):
            database.check_schema()
    database.close()


def test_the_migrated_tables_are_those_that_the_code_declares(database: Database) -> None:
    """Types, nullability, indexes and constraints; an empty difference."""
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_a_comparison_would_notice_a_missing_column(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE policies DROP COLUMN error")
        difference = compare_metadata(MigrationContext.configure(connection), tables.metadata)
    assert [(change[0], change[3].name) for change in difference] == [("add_column", "error")]


def test_an_upgrade_of_what_is_current_changes_nothing(database: Database) -> None:
    database.upgrade()
    database.check_schema()


def test_processes_that_upgrade_at_once_take_turns(empty_database_url: str) -> None:
    program = "import sys; from turnwise.store.database import Database; Database(sys.argv[1]).upgrade()"
    root = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen([sys.executable, "-c", program, empty_database_url], cwd=root, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    database = Database(empty_database_url)
    database.check_schema()
    database.close()
