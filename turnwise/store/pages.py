"""How many rows of an answer fit into one page: those up to a number of bytes, and always the first.

A client chooses the number of rows, and other clients have chosen their sizes. So the sizes are read first, which
neither decodes nor keeps the documents, and then the rows that fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from turnwise.store.rows import StoredRow

MAX_BYTES = 8 * 2**20
"""Size of a page as JSON, roughly; a page with one row may be larger."""
ID_BYTES = 2
"""Bytes of JSON for a stored byte of token ids: a number of four bytes has up to six digits and a comma."""
LOGPROB_BYTES = 5
"""Bytes of JSON for a stored byte of logprobs: a number of four bytes has up to twenty digits."""
ROW_BYTES = 1_000
"""The other fields of a row, roughly."""


def num_within(sizes: Iterable[int], most: int) -> int:
    totals = enumerate(itertools.accumulate(sizes))
    return sum(1 for _ in itertools.takewhile(lambda each: each[0] == 0 or each[1] <= most, totals))


def num_fitting(sizes: Iterable[int], limit: int, max_bytes: int) -> int:
    return num_within((size + ROW_BYTES for size in itertools.islice(sizes, limit)), max_bytes)


def read(
    conn: sa.Connection,
    found: sa.Select[*tuple[Any, ...]],
    limit: int,
    *,
    size: sa.ColumnElement[int] | None = None,
    max_bytes: int | None = None,
) -> tuple[list[StoredRow], bool]:
    """Return the first rows of a query, and whether there are more.

    Args:
        conn: A transaction.
        found: The query, in the order of the list.
        limit: Maximum number of rows.
        size: Bytes of a row.
        max_bytes: Size at which the page ends before its limit; None for any size.
    """
    if size is not None and max_bytes is not None:
        limit = num_fitting(conn.execute(found.with_only_columns(size).limit(limit)).scalars(), limit, max_bytes)
    page = list(conn.execute(found.limit(limit + 1)))
    return page[:limit], len(page) > limit
