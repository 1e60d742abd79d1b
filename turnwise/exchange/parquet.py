"""Rows to a Parquet file, in groups of a fixed number: memory is bounded, and the same rows give the same bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from turnwise.types import Json

ROWS_IN_GROUP = 256
"""Rows that are held in memory and written together."""


def write_rows(path: Path, columns: Json, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows with these columns, given by pyarrow's types; return how many."""
    import pyarrow.parquet

    schema: Any = pyarrow.schema(columns.items())
    remaining, count = iter(rows), 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while group := list(itertools.islice(remaining, ROWS_IN_GROUP)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count
