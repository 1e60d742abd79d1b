"""Copy a whole database into another one, of the same or the other kind, and prove that it arrived.

The source is read in one snapshot, and a row whose key the target has is left as it is, so a copy that was interrupted
is repeated as a whole. The proof is one sum of digests per table: both databases hold the same rows, in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import sqlalchemy as sa

from turnwise.errors import StoreError
from turnwise.store import schema
from turnwise.store.database import Database
from turnwise.store.rows import StoredRow
from turnwise.store.schema import metadata, policies, policy_versions
from turnwise.store.statements import insert_new_rows, sequence_of
from turnwise.types import DEFAULT_POLICY

OF_PROCESSES = frozenset({"leases", "trainer_status", "weight_servers"})
"""Tables about running processes, which are others over the target."""
ROWS_AT_ONCE = 500
_DIGEST_BITS = 64


def copy_all(source: Database, target: Database, note: Callable[[str, int], None]) -> dict[str, int]:
    """Copy every table but those of running processes; return the rows by table.

    The source may be in use, and later rows are left out. Nothing else may write to the target, whose tables are of
    this release. `note` gets each table with its rows, once they are copied and compared.

    Raises:
        StoreError: the target holds other rows than the source.
    """
    counts = {}
    with target.write() as conn:  # the migration has stored a default policy, and the source has one of its own
        is_new = policies.c.policy_id == DEFAULT_POLICY, ~sa.exists().select_from(policy_versions)
        conn.execute(sa.delete(policies).where(*is_new))
    with source.read() as conn:
        for table in metadata.sorted_tables:
            if table.name in OF_PROCESSES:
                continue
            counts[table.name] = _copy_table(conn, target, table)
            note(table.name, counts[table.name])
    return counts


def _copy_table(conn: sa.Connection, target: Database, table: sa.Table) -> int:
    count = digest = 0
    for rows in _portions(conn, table):
        count, digest = count + len(rows), digest + sum(map(_digest, rows))
        new = [dict(row._mapping) for row in rows]  # noqa: SLF001  SQLAlchemy's public name
        with target.write() as writing:
            insert_new_rows(writing, table, new, "1")
    found_count = found_digest = 0
    with target.read() as reading:
        for rows in _portions(reading, table):
            found_count, found_digest = found_count + len(rows), found_digest + sum(map(_digest, rows))
    if (count, digest % 2**_DIGEST_BITS) != (found_count, found_digest % 2**_DIGEST_BITS):
        raise StoreError(
            f"table {table.name!r} has {count} rows in the source and {found_count} in the target, or other values: "
            "copy into a database that holds nothing else, and let no process write to it meanwhile"
        )
    if table.autoincrement_column is not None:
        with target.write() as writing:
            _continue_numbers(writing, table.autoincrement_column)
    return count


def _portions(conn: sa.Connection, table: sa.Table) -> Iterator[Sequence[StoredRow]]:
    some = table.info.get(schema.ROWS_AT_ONCE, ROWS_AT_ONCE)
    yield from conn.execute(sa.select(table), execution_options={"yield_per": some}).partitions()


def _digest(row: StoredRow) -> int:
    values = [bytes(value) if isinstance(value, memoryview) else value for value in row]
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=_DIGEST_BITS // 8).digest())


def _continue_numbers(conn: sa.Connection, key: sa.Column[int]) -> None:
    """Let the database number the next row after the highest stored key, which a copy has brought."""
    if conn.dialect.name == "sqlite":
        return
    highest = sa.select(sa.func.max(key)).scalar_subquery()
    conn.execute(sa.select(sa.func.setval(sequence_of(key), highest)).where(highest > 0))  # a default policy has 0
