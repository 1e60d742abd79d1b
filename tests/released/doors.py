"""What the public doors answer about a database, and the databases that releases have left."""

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from released.rows import DIGEST
from support.commands import invoke
from support.in_process import served
from turnwise_fake_engine import running_fake_engine

from proxy import features
from turnwise.store.database import Database, alembic_config

DIRECTORY = Path(__file__).parent
COMMANDS = (
    "sessions --limit 1000 --json",
    "export --format sessions --all",
    "export --format jsonl",
    "policies --json",
    "policies list --json",
    "updates --json",
    "keys list --json",
    "verify --json",
)
PATHS = (
    "/v1/sessions",
    "/v1/sessions/s",
    "/v1/sessions/s/turns",
    "/v1/turns/t-s-t2",
    "/v1/turns/t-s-t2/tokens",
    "/v1/turns/t-s-t2/logprobs",
    "/v1/experiences",
    "/v1/feedback?session_id=s",
    "/v1/consent",
    "/v1/examples",
    "/v1/updates",
    "/v1/policies/default/lineage?version=1",
    f"/v1/images/{DIGEST}",
)
CENTURY = 3e9
"""Seconds after which a session is idle: what a release has left open stays so."""


def answers(url: str, key: str, doors: tuple[str, ...]) -> dict[str, Any]:
    """Return what each door answers: a command its output, a path its body, as JSON where it is JSON."""
    found = {each: _said(each, url) for each in doors if not each.startswith("/")}
    with running_fake_engine() as engine:
        given = features.Settings(engine=[engine.url], database=url, engine_check="off", session_idle_seconds=CENTURY)
        with served(given, routes=features.ROUTES, features=features.served()) as http:
            for path in (each for each in doors if each.startswith("/")):
                answer = http.get(path, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == 200, (path, answer.text)
                found[path] = _read(answer.text) if "json" in answer.headers["content-type"] else answer.content.hex()
    return found


def _said(line: str, url: str) -> Any:
    done = invoke(*line.split(), "--database", url)
    assert done.exit_code == 0, (line, done.output)
    return _read(done.stdout)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def releases() -> list[str]:
    """Return the releases that have left a database."""
    return sorted(file.name.removesuffix(".sql.gz") for file in DIRECTORY.glob("*.sql.gz"))


def answered(release: str) -> dict[str, Any]:
    """Return what the doors answered when it was released, with the `key` that they were asked with."""
    found: dict[str, Any] = json.loads(gzip.decompress((DIRECTORY / f"{release}.json.gz").read_bytes()))
    return found


def restore(release: str, url: str, directory: Path) -> None:
    """Make the database that a release has left: an SQLite file as it was, or on PostgreSQL its tables and rows."""
    file = Path(url.removeprefix("sqlite:///")) if url.startswith("sqlite:///") else directory / f"{release}.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(gzip.decompress((DIRECTORY / f"{release}.sql.gz").read_bytes()).decode())
    if not url.startswith("sqlite:///"):
        source, target = Database(f"sqlite:///{file}"), Database(url)
        with source.read() as reading, target.write() as writing:
            _copy(reading, writing)
        source.close()
        target.close()


def migrate(conn: sa.Connection, revision: str) -> None:
    config = alembic_config()
    config.attributes["connection"] = conn
    command.upgrade(config, revision)


def revision_of(conn: sa.Connection) -> str:
    return str(conn.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one())


def _copy(reading: sa.Connection, writing: sa.Connection) -> None:
    migrate(writing, revision_of(reading))
    old, new = sa.MetaData(), sa.MetaData()
    old.reflect(reading, resolve_fks=False)
    new.reflect(writing)
    writing.execute(sa.delete(new.tables["policies"]))  # that of the migration; the release's comes with the others
    for table in new.sorted_tables:
        if (
            found := reading.execute(sa.select(old.tables[table.name])).mappings().all()
        ) and table.name != "alembic_version":
            writing.execute(sa.insert(table), [dict(row) for row in found])
        for key in table.primary_key:
            if key.server_default is not None:
                last = sa.select(sa.func.max(key)).scalar_subquery()
                writing.execute(
                    sa.select(sa.func.setval(sa.func.pg_get_serial_sequence(table.name, key.name), last)).where(
                        last > 0
                    )
                )
