"""Databases with this release's tables."""

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

import turnwise.features  # noqa: F401  the store calls them from here on
from turnwise.store.database import Database


def migrated(url: str) -> str:
    """Bring the tables of a database up to date; return its URL. A new SQLite file is a copy of one made before."""
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        shutil.copy(migrated_file(), path)
        return url
    database = Database(url)
    database.upgrade()
    database.close()
    return url


def new_database(path: Path) -> Database:
    return Database(migrated(f"sqlite:///{path}"))


@contextlib.contextmanager
def writing(url: str) -> Iterator[sa.Connection]:
    with contextlib.closing(Database(url)) as database, database.write() as connection:
        yield connection


@functools.cache
def migrated_file() -> Path:
    """An SQLite file with tables and without rows; it is removed at the end of this process."""
    directory = tempfile.TemporaryDirectory(prefix="turnwise-template-", ignore_cleanup_errors=True)
    atexit.register(directory.cleanup)
    database = Database(f"sqlite:///{directory.name}/template.db")
    database.upgrade()
    database.close()
    return Path(directory.name) / "template.db"
