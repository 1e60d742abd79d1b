"""Statements that SQLAlchemy alone does not cover: the hot path, and SQL that differs between the databases.

A statement that runs once per batch of turns is sent to the driver as cached text, because building and compiling it
would take longer than running it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")


def insert_ignoring(conn: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> bool:
    """Insert the row unless its key exists; return whether it was inserted."""
    return insert_if_new(conn, table, row) is not None


def insert_if_new(conn: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> Any:
    """Insert the row unless its key exists; return the first column of its primary key, None if it exists."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    key, *_ = table.primary_key.columns
    inserted = conn.execute(insert(table).values(**row).on_conflict_do_nothing().returning(key))
    return inserted.scalar_one_or_none()


ROWS_AT_ONCE = 1000
"""Maximum number of small rows that one transaction deletes of a table."""


def delete_some(
    conn: sa.Connection, table: sa.Table, *wanted: sa.ColumnElement[bool], limit: int = ROWS_AT_ONCE
) -> int:
    """Delete some of the rows that satisfy the conditions; return how many were deleted."""
    key = tuple(table.primary_key.columns)
    some = sa.select(*key).where(*wanted).limit(limit)
    return conn.execute(sa.delete(table).where(sa.tuple_(*key).in_(some))).rowcount


def last_assigned(conn: sa.Connection, key: sa.Column[int]) -> float:
    """Return the largest number that no later row gets from the database as its key."""
    if conn.dialect.name == "sqlite":
        return math.inf  # a new row gets the number after the largest one
    sequence = sa.func.pg_get_serial_sequence(key.table.name, key.name)
    last = sa.select(sa.func.pg_sequence_last_value(sa.cast(sequence, postgresql.REGCLASS)))
    return conn.execute(last).scalar_one() or 0


def execute(conn: sa.Connection, sql: str, values: tuple[Any, ...]) -> Any:
    """Run a statement of the hot path directly on the driver, because SQLAlchemy would take longer than the database.

    Returns:
        The driver's cursor.

    Raises:
        sqlalchemy.exc.DBAPIError: the same error that SQLAlchemy would raise.
    """
    with _translated(conn, sql, values):
        return conn.connection.dbapi_connection.execute(sql, values)  # type: ignore[union-attr]


def fetch(conn: sa.Connection, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Run a statement as `execute` does and return its rows; SQLite's driver computes the later ones as it is read.

    Raises:
        sqlalchemy.exc.DBAPIError: the same error that SQLAlchemy would raise.
    """
    with _translated(conn, sql, values):
        return conn.connection.dbapi_connection.execute(sql, values).fetchall()  # type: ignore[no-any-return, union-attr]


@contextlib.contextmanager
def _translated(conn: sa.Connection, sql: str, values: tuple[Any, ...]) -> Iterator[None]:
    """Raise the error that SQLAlchemy raises for an error of the driver."""
    driver: Any = conn.dialect.dbapi
    try:
        yield
    except driver.Error as error:
        raise sa.exc.DBAPIError.instance(sql, values, error, driver.Error, dialect=conn.dialect) from error


def fetch_rows(
    conn: sa.Connection,
    table: sa.Table,
    columns: Sequence[str],
    keys: Mapping[str, Sequence[Any]],
    *,
    lock: bool = False,
) -> list[tuple[Any, ...]]:
    """Return columns of the rows with these keys; this is the hot path.

    Args:
        conn: A transaction.
        table: The table to read.
        columns: SQL expressions of its columns.
        keys: The columns of the key, each with its value in every wanted row. PostgreSQL also returns rows that
            combine the values in another way.
        lock: Lock the rows until the transaction ends, in the order of the primary key.
    """
    if conn.dialect.name == "postgresql":
        sql = _rows_sql_postgresql(table, tuple(columns), tuple(keys), lock=lock)
        return fetch(conn, sql, tuple(list(set(values)) for values in keys.values()))
    found: list[tuple[Any, ...]] = []
    for chunk in _chunks(list(zip(*keys.values(), strict=True))):
        sql = _rows_sql_sqlite(table, tuple(columns), tuple(keys), len(chunk))
        found += fetch(conn, sql, tuple(itertools.chain.from_iterable(chunk)))
    return found


@functools.lru_cache
def _rows_sql_sqlite(table: sa.Table, columns: tuple[str, ...], keys: tuple[str, ...], num_rows: int) -> str:
    """Return the statement that reads so many rows by their keys; SQLite searches for each key in an index."""
    row, names = f"({', '.join('?' * len(keys))})", ", ".join(keys)
    wanted = f"WITH wanted({names}) AS (VALUES {', '.join([row] * num_rows)})"
    return f"{wanted} SELECT {', '.join(columns)} FROM wanted CROSS JOIN {table.name} USING ({names})"  # noqa: S608  names are ours


@functools.lru_cache
def _rows_sql_postgresql(table: sa.Table, columns: tuple[str, ...], keys: tuple[str, ...], *, lock: bool) -> str:
    condition = " AND ".join(f"{key} = ANY(%s)" for key in keys)
    locking = f" ORDER BY {', '.join(table.primary_key.columns.keys())} FOR UPDATE" if lock else ""
    return f"SELECT {', '.join(columns)} FROM {table.name} WHERE {condition}{locking}"  # noqa: S608  names are ours


def insert_rows(conn: sa.Connection, table: sa.Table, batch: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows whose values the driver accepts without conversion: no enum, no datetime.

    Values that are no columns of the table are left out.
    """
    _insert(conn, table, batch, "")


def insert_new_rows(
    conn: sa.Connection, table: sa.Table, batch: Sequence[Mapping[str, Any]], returned: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Insert those rows whose keys do not exist, as `insert_rows`; return some columns of the inserted rows."""
    return _insert(conn, table, batch, f" ON CONFLICT DO NOTHING RETURNING {', '.join(returned)}")


def _insert(
    conn: sa.Connection, table: sa.Table, batch: Sequence[Mapping[str, Any]], suffix: str
) -> list[tuple[Any, ...]]:
    """Insert rows; return what the statement's suffix returns.

    One statement inserts many rows, because the driver releases the interpreter's lock between statements and waits to
    reacquire it.
    """
    found: list[tuple[Any, ...]] = []
    if not batch:
        return found
    columns = tuple(filter(_columns(table).__contains__, batch[0]))
    values_of = operator.itemgetter(*columns)
    for chunk in _chunks(batch):
        values = tuple(itertools.chain.from_iterable(map(values_of, chunk)))
        sql = _insert_sql(table, columns, len(chunk), conn.dialect.name, suffix)
        if suffix:
            found += fetch(conn, sql, values)
        else:
            execute(conn, sql, values)
    return found


@functools.lru_cache
def _columns(table: sa.Table) -> frozenset[str]:
    return frozenset(table.c.keys())


_ROWS_PER_STATEMENT = (32, 16, 8, 4, 2, 1)
"""A batch is split into these sizes, so that few different statements are prepared."""


def _chunks(batch: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split the rows of a batch into those of its statements."""
    start = 0
    for size in _ROWS_PER_STATEMENT:
        while len(batch) - start >= size:
            yield batch[start : start + size]
            start += size


@functools.lru_cache
def _insert_sql(table: sa.Table, columns: tuple[str, ...], num_rows: int, dialect_name: str, suffix: str) -> str:
    mark = "%s" if dialect_name == "postgresql" else "?"
    row = f"({', '.join([mark] * len(columns))})"
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES {', '.join([row] * num_rows)}{suffix}"  # noqa: S608  names are ours


def count_up(conn: sa.Connection, batch: Sequence[tuple[int, int, int, int]]) -> None:
    """Increase the numbers of turns and chains of sessions and update their last activity, many in one statement.

    Args:
        conn: a transaction of `Database.write`.
        batch: session_pk, new turns, new chains, instant of the last activity; each session once.
    """
    for chunk in _chunks(batch):
        execute(conn, _count_sql(len(chunk), conn.dialect.name), tuple(itertools.chain.from_iterable(chunk)))


@functools.lru_cache
def _count_sql(num_rows: int, dialect_name: str) -> str:
    row = "(%s::bigint, %s::int, %s::int, %s::bigint)" if dialect_name == "postgresql" else "(?, ?, ?, ?)"
    latest = "greatest" if dialect_name == "postgresql" else "max"
    new = f"WITH new(session_pk, turns, chains, at) AS (VALUES {', '.join([row] * num_rows)})"
    return (
        f"{new} UPDATE sessions SET num_turns = num_turns + new.turns, num_chains = num_chains + new.chains, "  # noqa: S608
        f"last_active_at = {latest}(last_active_at, new.at) FROM new WHERE sessions.session_pk = new.session_pk"
    )


def is_among(dialect: sa.Dialect, column: sa.Column[Any], values: Collection[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that the column is one of these values; its SQL does not depend on their number."""
    if dialect.name == "postgresql":
        return column == sa.any_(sa.literal(list(values), postgresql.ARRAY(column.type)))
    return column.in_(sa.select(sa.func.json_each(json.dumps(list(values))).table_valued("value").c.value))


def unindexed(column: sa.Column[str]) -> sa.ColumnElement[str]:
    """Return the value of a column of texts as an expression, so that the databases search by other conditions.

    No index applies to the expression, while its value is that of the column.
    """
    return column.concat(sa.literal_column("''"))
