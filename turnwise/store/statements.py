"""Statements that SQLAlchemy alone does not cover: the hot path, and SQL that differs between the databases.

A statement that runs once per batch of turns is sent to the driver as cached text, because building and compiling it
would take longer than running it.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def insert_ignoring(conn: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> bool:
    """Insert the row unless its key exists; return whether it was inserted."""
    return insert_if_new(conn, table, row) is not None


def insert_if_new(conn: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> Any:
    """Insert the row unless its key exists; return the first column of its primary key, None if it exists."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    key, *_ = table.primary_key.columns
    inserted = conn.execute(insert(table).values(**row).on_conflict_do_nothing().returning(key))
    return inserted.scalar_one_or_none()


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
    driver = conn.dialect.dbapi
    assert driver is not None
    try:
        return conn.connection.driver_connection.execute(sql, values)  # type: ignore[union-attr]
    except driver.Error as error:
        raise sa.exc.DBAPIError.instance(sql, values, error, driver.Error, dialect=conn.dialect) from error


def fetch_at_once(conn: sa.Connection, query: sa.Select[*tuple[Any, ...]], parameters: Mapping[str, Any]) -> list[Any]:
    """Return a query's rows of numbers and texts as sequences; SQLite returns them as one row of JSON.

    This is the hot path: the driver releases the interpreter's lock before every row and waits to reacquire it.
    """
    if conn.dialect.name == "postgresql":
        return list(conn.execute(query, parameters))
    sql, names = _json_sql(query)
    found: list[Any] = json.loads(execute(conn, sql, tuple(parameters[name] for name in names)).fetchone()[0])
    return found


@functools.lru_cache
def _json_sql(query: sa.Select[*tuple[Any, ...]]) -> tuple[str, tuple[str, ...]]:
    """Return the statement that returns a query's rows as JSON, and the names of its parameters in order."""
    rows = query.subquery()
    compiled = sa.select(sa.func.json_group_array(sa.func.json_array(*rows.c))).compile(dialect=sqlite.dialect())
    return str(compiled), tuple(compiled.positiontup or ())


def insert_rows(conn: sa.Connection, table: sa.Table, batch: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows whose values the driver accepts without conversion: no enum, no datetime."""
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
    columns = tuple(batch[0])
    values_of = operator.itemgetter(*columns)
    start = 0
    for size in _ROWS_PER_STATEMENT:
        while len(batch) - start >= size:
            values = tuple(itertools.chain.from_iterable(map(values_of, batch[start : start + size])))
            cursor = execute(conn, _insert_sql(table, columns, size, conn.dialect.name) + suffix, values)
            if suffix:
                found += cursor.fetchall()
            start += size
    return found


_ROWS_PER_STATEMENT = (32, 8, 1)
"""A batch is split into these sizes, so that few different statements are prepared."""


@functools.lru_cache
def _insert_sql(table: sa.Table, columns: tuple[str, ...], num_rows: int, dialect_name: str) -> str:
    mark = "%s" if dialect_name == "postgresql" else "?"
    row = f"({', '.join([mark] * len(columns))})"
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES {', '.join([row] * num_rows)}"  # noqa: S608  names are ours


def count_up(conn: sa.Connection, batch: Sequence[tuple[int, int, int, int]]) -> None:
    """Increase the numbers of turns and chains of sessions and update their last activity, in one statement.

    Args:
        conn: a transaction of `Database.write`.
        batch: session_pk, new turns, new chains, instant of the last activity; each session once.
    """
    start = 0
    for size in _ROWS_PER_STATEMENT:
        while len(batch) - start >= size:
            values = tuple(value for row in batch[start : start + size] for value in row)
            execute(conn, _count_sql(size, conn.dialect.name), values)
            start += size


@functools.lru_cache
def _count_sql(num_rows: int, dialect_name: str) -> str:
    row = "(%s::bigint, %s::int, %s::int, %s::bigint)" if dialect_name == "postgresql" else "(?, ?, ?, ?)"
    latest = "greatest" if dialect_name == "postgresql" else "max"
    new = f"WITH new(session_pk, turns, chains, at) AS (VALUES {', '.join([row] * num_rows)})"
    return (
        f"{new} UPDATE sessions SET num_turns = num_turns + new.turns, num_chains = num_chains + new.chains, "  # noqa: S608
        f"last_active_at = {latest}(last_active_at, new.at) FROM new WHERE sessions.session_pk = new.session_pk"
    )


def is_among(dialect_name: str, column: sa.Column[Any], parameter: str) -> sa.ColumnElement[bool]:
    """Return the condition that the column is one of a list of values; its SQL does not depend on their number."""
    if dialect_name == "postgresql":
        return column == sa.any_(sa.bindparam(parameter, type_=postgresql.ARRAY(column.type)))
    return column.in_(sa.select(sa.func.json_each(sa.bindparam(parameter)).table_valued("value").c.value))


def unindexed(column: sa.Column[str]) -> sa.ColumnElement[str]:
    """Return the value of a column of texts as an expression, so that the databases search by other conditions.

    No index applies to the expression, while its value is that of the column.
    """
    return column.concat(sa.literal_column("''"))


def members(dialect_name: str, values: Collection[Any]) -> Any:
    """Return the list as the parameter of `is_among`."""
    return list(values) if dialect_name == "postgresql" else json.dumps(list(values))
