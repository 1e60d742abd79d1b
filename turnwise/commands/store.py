"""How a command opens the database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from turnwise.store import keys
from turnwise.store.database import Database


@contextlib.contextmanager
def opened(url: str, *, make_ready: bool = True) -> Iterator[Database]:
    """Open a database for one command, and bring the tables of an SQLite file up to date first.

    Raises:
        SchemaMismatch: its tables are not those of this release.
        StoreUnavailable: it cannot be reached.
    """
    database = Database(url)
    try:
        if make_ready:
            database.prepare()
        yield database
    finally:
        database.close()


def prepare(url: str) -> None:
    """Bring the tables of an SQLite file up to date; make sure that those of PostgreSQL are.

    Raises:
        SchemaMismatch: the tables are not those of this release.
        StoreUnavailable: the database cannot be reached.
    """
    with opened(url):
        pass


def has_keys(url: str) -> bool:
    """Return whether a key was ever created, revoked or not."""
    with opened(url) as database, database.read() as conn:
        return keys.any_keys(conn)
