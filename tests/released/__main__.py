"""What a release leaves to later ones: its tables, frozen in their migration, and a database with rows in each.

`make release-fixture` writes both, with what the public doors answer about the rows; tests read them back in each later
release. The migration of 0.2.0 is written only until that release, because its databases have what it says.
"""

import gzip
import json
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from contextlib import closing
from pathlib import Path

from released.doors import COMMANDS, DIRECTORY, PATHS, answers
from released.rows import fill_all
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

import turnwise.features  # noqa: F401  the tables of features are declared there
from turnwise import __version__
from turnwise.store.database import Database
from turnwise.store.schema import indexes, metadata

ROOT = Path(__file__).parents[2]
MIGRATION = ROOT / "migrations" / "versions" / "0001_tables.py"
DIALECTS = sqlite.dialect(), postgresql.dialect()
IS_UNRELEASED = "## [0.2.0] - not released yet"
UNBROKEN = "\xa0"
DIFFERING = {("INTEGER", "BIGSERIAL"): "{serial}", ("INTEGER", "BIGINT"): "{key}", ("BLOB", "BYTEA"): "{blob}"}
"""The words of SQLite and PostgreSQL for one type, and the name of it in the migration."""
HEAD = '''"""The tables of release 0.2, as `make release-fixture` wrote them before it: they never change here.

A later change of `turnwise.store.schema`, or of a feature's table, is a new migration, which only adds.
"""

from __future__ import annotations

import re
import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TYPES = {types}
TABLES = """
{tables};
"""
INDEXES = """
{indexes};
"""
"""In the order of their creation: of two that serve a query equally well, SQLite takes the last one."""


def upgrade() -> None:
    """Create all tables, and the default policy."""
    types = TYPES[op.get_bind().dialect.name]
    for statement in (TABLES.format(**types) + INDEXES).split(";")[:-1]:
        op.execute(" ".join(statement.split()))
    policies = sa.table("policies", *map(sa.column, ("policy_id", "tenant", "name", "created_at")))
    default = {{"policy_id": 0, "tenant": "", "name": "default", "created_at": time.time_ns() // 1000}}
    op.bulk_insert(policies, [default])


def downgrade() -> None:
    """Drop all tables."""
    for name in reversed(re.findall(r"CREATE TABLE (\\w+)", TABLES)):
        op.drop_table(name)
'''


def frozen_tables() -> str:
    """Return the migration that makes the tables as they are declared now."""
    tables = metadata.sorted_tables
    source = HEAD.format(
        types={
            name: {each.strip("{}"): words[number] for words, each in DIFFERING.items()}
            for number, name in enumerate(("sqlite", "postgresql"))
        },
        tables=";\n".join(_statement(CreateTable(table)) for table in tables),
        indexes=";\n".join(_statement(CreateIndex(each)) for each in indexes),
    )
    format_it = [sys.executable, "-m", "ruff", "format", "--stdin-filename", MIGRATION, "-"]
    return subprocess.run(format_it, input=source, text=True, capture_output=True, check=True).stdout


def _statement(made: CreateTable | CreateIndex) -> str:
    pairs = zip(*(str(made.compile(dialect=each)).split() for each in DIALECTS), strict=True)
    text = " ".join(one if one == other else _word(one, other) for one, other in pairs)
    whole = text.replace("( ", "(").removesuffix(" )").replace(" ", UNBROKEN).replace(f",{UNBROKEN}", ", ")
    whole = whole.replace(f"{UNBROKEN}REF", " REF")
    end = ")" if isinstance(made, CreateTable) else ""
    return (textwrap.fill(whole, 118, subsequent_indent="    ", break_long_words=False) + end).replace(UNBROKEN, " ")


def _word(of_sqlite: str, of_postgresql: str) -> str:
    if of_sqlite.replace('"', "") == of_postgresql.replace('"', ""):
        return max(of_sqlite, of_postgresql, key=len)  # one of them has the name as a keyword, and quotes it
    comma = "," if of_sqlite.endswith(",") else ""
    return DIFFERING[of_sqlite.rstrip(","), of_postgresql.rstrip(",")] + comma


def write_fixture() -> None:
    """Write a database of this release with rows in each table, and what the public doors answer about them."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "released.db"
        url = f"sqlite:///{file}"
        with closing(Database(url)) as database:
            database.upgrade()
            key = fill_all(database)
        with closing(sqlite3.connect(file)) as connection:
            dump = "\n".join(connection.iterdump())
        found = {"key": key, "answers": answers(url, key, (*COMMANDS, *PATHS))}
    for name, text in (("sql", dump), ("json", json.dumps(found))):
        (DIRECTORY / f"{__version__}.{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def main() -> None:
    if IS_UNRELEASED in (ROOT / "CHANGELOG.md").read_text():
        MIGRATION.write_text(frozen_tables())
    write_fixture()


if __name__ == "__main__":
    main()
