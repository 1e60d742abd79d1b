"""Statements that SQLAlchemy alone does not cover: the hot path, SQL that differs by database, pages by their bytes.

A statement that runs once per batch of turns is sent to the driver as cached text, because building and compiling it
would take longer than running it. A client chooses the number of rows of a page, and other clients have chosen their
sizes. So the sizes are read first, which neither decodes nor keeps the documents, and then the rows that fit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from turnwise.parts import HEADER_BYTES
from turnwise.store.rows import StoredRow
from turnwise.store.schema import turns

ROWS_AT_ONCE = 1000
PAGE_BYTES = 8 * 2**20
"""Size of a page as JSON, roughly; a page with one row may be larger."""
ID_BYTES = 2
"""Bytes of JSON for a stored byte of token ids: a number of four bytes has up to six digits and a comma."""
LOGPROB_BYTES = 5
"""Bytes of JSON for a stored byte of logprobs: a number of four bytes has up to twenty digits."""
ROW_BYTES = 1_000


def delete_some(conn: sa.Connection, table: sa.Table, wanted: sa.ColumnElement[bool]) -> int:
    """Delete the first `ROWS_AT_ONCE` of the rows that satisfy the condition; return how many were deleted."""
    key = tuple(table.primary_key.columns)
    some = sa.select(*key).where(wanted).limit(ROWS_AT_ONCE)
    return conn.execute(sa.delete(table).where(sa.tuple_(*key).in_(some))).rowcount


def execute(conn: sa.Connection, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Run a statement of the hot path directly on the driver, because SQLAlchemy would take longer than the database.

    Its errors are those that SQLAlchemy would raise.
    """
    with _translated(conn, sql):  # SQLite's driver computes the later rows as they are read
        cursor: Any = conn.connection.dbapi_connection.execute(sql, values)  # type: ignore[union-attr]
        return cursor.fetchall() if cursor.description else []


def execute_many(conn: sa.Connection, sql: str, batch: Sequence[tuple[Any, ...]]) -> None:
    """Run a statement as `execute` does, once for each of several rows of values; PostgreSQL gets them together."""
    if len(batch) == 1:
        execute(conn, sql, batch[0])
        return
    with _translated(conn, sql):
        conn.connection.cursor().executemany(sql, batch)


@contextlib.contextmanager
def _translated(conn: sa.Connection, sql: str) -> Iterator[None]:
    driver: Any = conn.dialect.dbapi
    try:
        yield
    except driver.Error as error:
        raise sa.exc.DBAPIError.instance(sql, None, error, driver.Error, dialect=conn.dialect) from error


def mark(dialect: sa.Dialect) -> str:
    return "%s" if dialect.name == "postgresql" else "?"


def fetch_rows(
    conn: sa.Connection,
    table: sa.Table,
    columns: Sequence[str],
    keys: Mapping[str, Sequence[Any]],
    *,
    lock: bool = False,
) -> list[tuple[Any, ...]]:
    """Return columns, as SQL expressions, of the rows with these keys; this is the hot path.

    `keys` are the columns of the key, each with its value in every wanted row; PostgreSQL also returns rows that
    combine the values in another way. `lock` locks the rows until the transaction ends, in the order of the primary
    key.
    """
    selected = f"SELECT {', '.join(columns)} FROM"
    if conn.dialect.name == "postgresql":
        condition = " AND ".join(f"{key} = ANY(%s)" for key in keys)
        locking = f" ORDER BY {', '.join(table.primary_key.columns.keys())} FOR UPDATE" if lock else ""
        sql = f"{selected} {table.name} WHERE {condition}{locking}"
        return execute(conn, sql, tuple(list(set(values)) for values in keys.values()))
    # SQLite searches for each key in an index.
    condition = " AND ".join(f"{key} = json_extract(wanted.value, '$[{number}]')" for number, key in enumerate(keys))
    wanted = json.dumps(list(zip(*keys.values(), strict=True)))
    return execute(conn, f"{selected} json_each(?) AS wanted CROSS JOIN {table.name} ON {condition}", (wanted,))


def insert_rows(conn: sa.Connection, table: sa.Table, batch: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows whose values the driver accepts without conversion: no enum, no datetime.

    Values that are no columns of the table are left out.
    """
    if batch:
        sql, values_of = _insert_sql(table, tuple(batch[0]), 1, mark(conn.dialect))
        execute_many(conn, sql, list(map(values_of, batch)))


def insert_new_rows(
    conn: sa.Connection, table: sa.Table, batch: Sequence[Mapping[str, Any]], *returned: str
) -> list[tuple[Any, ...]]:
    """Insert those of some hundred rows whose keys do not exist, as `insert_rows`; return columns of those inserted."""
    if not batch:
        return []
    sql, values_of = _insert_sql(table, tuple(batch[0]), len(batch), mark(conn.dialect))
    values = tuple(itertools.chain.from_iterable(map(values_of, batch)))
    return execute(conn, f"{sql} ON CONFLICT DO NOTHING RETURNING {', '.join(returned)}", values)


def insert_ignoring(conn: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> bool:
    return bool(insert_new_rows(conn, table, [row], "1"))


@functools.lru_cache
def _insert_sql(
    table: sa.Table, names: tuple[str, ...], num_rows: int, value: str
) -> tuple[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
    """Return the statement that inserts this number of rows, and what returns the values of a row."""
    columns = [name for name in names if name in table.c]
    row = f"({', '.join([value] * len(columns))})"
    sql = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES {', '.join([row] * num_rows)}"  # noqa: S608  names are ours
    return sql, operator.itemgetter(*columns)


def is_among(dialect: sa.Dialect, column: sa.Column[Any], values: Collection[Any]) -> sa.ColumnElement[bool]:
    """Return the condition that the column is one of these values; its SQL does not depend on their number."""
    if dialect.name == "postgresql":
        return column == sa.any_(sa.literal(list(values), postgresql.ARRAY(column.type)))
    return column.in_(sa.select(sa.func.json_each(json.dumps(list(values))).table_valued("value").c.value))


def size_of(dialect: sa.Dialect, *columns: sa.ColumnElement[str | bytes]) -> sa.ColumnElement[int]:
    """Return the stored bytes of texts or arrays, as an expression that PostgreSQL computes without reading them."""
    length = sa.func.octet_length if dialect.name == "postgresql" else sa.func.length  # stored texts are ASCII
    total: sa.ColumnElement[int] = sa.literal_column("0", sa.Integer)
    for column in columns:
        total = total + sa.func.coalesce(length(column), 0)
    return total


def beginning_of_parts() -> sa.ColumnElement[bytes]:
    """Return the beginning of a turn's parts, which `turnwise.parts.sizes_of` reads."""
    return sa.func.substr(turns.c.parts, 1, HEADER_BYTES, type_=sa.LargeBinary)


def unindexed(column: sa.Column[str]) -> sa.ColumnElement[str]:
    """Return the value of a column of texts as an expression, so that the databases search by other conditions.

    No index applies to the expression, while its value is that of the column.
    """
    return column.concat(sa.literal_column("''"))


def num_within(sizes: Iterable[int], most: int) -> int:
    totals = enumerate(itertools.accumulate(sizes))
    return sum(1 for _ in itertools.takewhile(lambda each: each[0] == 0 or each[1] <= most, totals))


def num_fitting(sizes: Iterable[int], limit: int, max_bytes: int) -> int:
    return num_within((size + ROW_BYTES for size in itertools.islice(sizes, limit)), max_bytes)


def read_page(
    conn: sa.Connection,
    found: sa.Select[*tuple[Any, ...]],
    limit: int,
    *,
    size: sa.ColumnElement[int] | None = None,
    max_bytes: int | None = None,
) -> tuple[list[StoredRow], bool]:
    """Return the first rows of a query, and whether there are more.

    With `size`, the bytes of a row, and `max_bytes` the page may end before its limit.
    """
    if size is not None and max_bytes is not None:
        limit = num_fitting(conn.execute(found.with_only_columns(size).limit(limit)).scalars(), limit, max_bytes)
    page = list(conn.execute(found.limit(limit + 1)))
    return page[:limit], len(page) > limit
