"""Migrations: up and down, twice, and which databases are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from support.waiting import WAIT_SECONDS

from turnwise.errors import SchemaMismatch
from turnwise.store.database import Database, alembic_config

REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
"""All of them, oldest first."""


def test_every_revision_goes_up_and_down_twice(empty_database_url):
    database, config = Database(empty_database_url), alembic_config()
    for _ in range(2):
        database.upgrade()
        database.check_schema()
        for revision in ["base", *REVISIONS[:-1]][::-1]:
            with database.write() as config.attributes["connection"]:
                command.downgrade(config, revision)
        with pytest.raises(SchemaMismatch, match=r"has no Turnwise tables.*turnwise db upgrade"):
            database.check_schema()
    database.close()


def test_processes_that_upgrade_at_once_take_turns(empty_database_url):
    program = "import sys; from turnwise.store.database import Database; Database(sys.argv[1]).upgrade()"
    root = str(Path(__file__).parents[3])
    processes = [
        subprocess.Popen([sys.executable, "-c", program, empty_database_url], cwd=root, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=WAIT_SECONDS)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    database = Database(empty_database_url)
    database.check_schema()
    database.close()


def test_a_new_sqlite_file_gets_its_tables_and_on_postgresql_the_error_names_the_command(empty_database_url):
    database = Database(empty_database_url)
    if database.dialect == "sqlite":
        assert database.prepare()
        database.check_schema()
        assert not database.prepare()
    else:
        with pytest.raises(SchemaMismatch, match="turnwise db upgrade"):
            database.prepare()
    database.close()


UNKNOWN = "UPDATE alembic_version SET version_num = '{}'"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (UNKNOWN.format("0019"), "revision '0019'.*does not know"),
        (UNKNOWN.format("9999"), "revision '9999'.*does not know"),
        ("ALTER TABLE policy_versions DROP COLUMN alarm", "another commit .*policy_versions.alarm"),
        ("ALTER TABLE turns ADD COLUMN former INTEGER", "another commit .*turns.former"),
        ("DROP TABLE feedback", "another commit .*feedback."),
        ("DELETE FROM policies", "another commit .*default policy"),
    ],
)
def test_tables_of_another_revision_or_commit_are_refused_and_the_error_says_how_to_move_them(database, change, named):
    """Until 0.2 the one revision is that of many commits: the upgrade did nothing, and its keys got 401."""
    with database.write() as connection:
        connection.exec_driver_sql(change)
    for check in (database.prepare, database.check_schema, database.upgrade):
        with pytest.raises(
            SchemaMismatch, match=rf"{named}.*(db import-unreleased|the release that made it).*Upgrades"
        ):
            check()


def test_another_programs_sqlite_file_gets_no_tables(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/other.db")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE songs (title TEXT)")
    with pytest.raises(SchemaMismatch, match="none of Turnwise"):
        database.prepare()
    database.close()
