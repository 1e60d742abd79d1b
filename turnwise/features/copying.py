"""Copy a whole database into another one, of the same or the other kind, and prove that it arrived; back one up.

The source is read in one snapshot, and a row whose key the target has is left as it is, so a copy that was interrupted
is repeated as a whole. The proof is one sum of digests per table: both databases hold the same rows, in any order.

A database of a commit before 0.2 is read with the columns that it has. What a column held that is gone is moved; one
that came later gets what the program meant without it. Any other difference stops the copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa

from turnwise import parts
from turnwise.errors import SettingsError, StoreError
from turnwise.features.copies import session_copies
from turnwise.files import create_private, replaced, synchronise
from turnwise.store import schema
from turnwise.store.database import Database
from turnwise.store.schema import metadata, policies, policy_versions, sessions, turns
from turnwise.store.statements import execute, insert_new_rows
from turnwise.types import DEFAULT_POLICY

OF_PROCESSES = frozenset({"leases", "trainer_status", "weight_servers"})
"""Tables about running processes, which are others over the target."""
ROWS_AT_ONCE = 500
_DIGEST_BITS = 64
Row: TypeAlias = Mapping[Any, Any]
Portions: TypeAlias = Callable[[sa.Connection, sa.Table], Iterator[Sequence[Row]]]
LATER = {"train": 1, "record": 1, "policy_id": DEFAULT_POLICY, "parts": b""}
"""What columns that came before 0.2 and are never null mean for rows of before."""


def portions(conn: sa.Connection, table: sa.Table) -> Iterator[Sequence[Row]]:
    some = table.info.get(schema.ROWS_AT_ONCE, ROWS_AT_ONCE)
    found = conn.execute(sa.select(table), execution_options={"yield_per": some})
    yield from found.mappings().partitions()


def portions_of_unreleased(conn: sa.Connection, table: sa.Table) -> Iterator[Sequence[Row]]:
    """Yield the rows of a table of a commit before 0.2 as those of this release.

    Raises:
        StoreError: its columns differ in a way that no commit before 0.2 had.
    """
    if not sa.inspect(conn).has_table(table.name):
        if table is session_copies:
            yield from _demonstrations(conn)
        return
    old = sa.Table(table.name, sa.MetaData(), autoload_with=conn, resolve_fks=False)
    moved = {each.column for each in parts.known.values() if each.column is not None} if table is turns else set()
    gone = {*old.c.keys()} - {*table.c.keys()} - moved
    needed = {column.name for column in table.c if not column.nullable} - {*old.c.keys()} - LATER.keys()
    if gone or needed:
        raise StoreError(
            f"table {table.name!r} is of no commit before 0.2 that is known: {min({*gone, *needed})!r} differs; "
            "move it with the commit that made it to one that is named in docs/operations.md, Upgrades"
        )
    added = {column.name: LATER.get(column.name) for column in table.c if column.name not in old.c}
    own = sa.select(old)
    if table is turns:  # null, and without the column, a turn's policy is its session's
        its = sa.select(sessions.c.policy_id).where(sessions.c.session_pk == old.c.session_pk).scalar_subquery()
        own = own.add_columns(its.label("of_session"))
    some = table.info.get(schema.ROWS_AT_ONCE, ROWS_AT_ONCE)
    for rows in conn.execute(own, execution_options={"yield_per": some}).mappings().partitions():
        yield [_turn(row) if table is turns else {**added, **row} for row in rows]


def _turn(row: Row) -> Row:
    found = dict(_with_parts(row))
    of_session, policy_id = found.pop("of_session"), found.get("policy_id")
    return {**found, "policy_id": of_session if policy_id is None else policy_id}


def _with_parts(row: Row) -> Row:
    """Return a turn's row with its parts packed, where it has them in the columns of before turns had parts."""
    if "parts" in row:
        return dict(row)
    columns = {each.column: name for name, each in parts.known.items() if each.column is not None}
    found = {name: row[column] for column, name in columns.items() if row.get(column) is not None}
    packed = {name: value.encode() if parts.part(name).is_text else value for name, value in found.items()}
    return {name: value for name, value in row.items() if name not in columns} | {"parts": parts.pack_parts(packed)}


def _demonstrations(conn: sa.Connection) -> Iterator[Sequence[Row]]:
    """Yield which sessions demonstrations made, before a table said so: those of the groups that feedback names."""
    feedback = metadata.tables["feedback"]
    copy, source = sessions.alias("copy"), sessions.alias("source")
    found = (
        sa.select(copy.c.session_pk, source.c.session_id.label("source_id"), copy.c.tenant)
        .join(source, (source.c.tenant == copy.c.tenant) & (source.c.session_pk != copy.c.session_pk))
        .join(feedback, (feedback.c.session_pk == source.c.session_pk) & (feedback.c.group_id == copy.c.group_id))
        .distinct()
    )
    yield [{**row, "made_by": feedback.name} for row in conn.execute(found).mappings()]


def copy_all(
    source: Database, target: Database, note: Callable[[str, int], None], read: Portions = portions
) -> dict[str, int]:
    """Copy every table but those of running processes; return the rows by table.

    The source may be in use, and later rows are left out. Nothing else may write to the target, whose tables are of
    this release. `note` gets each table with its rows, once they are copied and compared. `read` yields the source's.

    Raises:
        StoreError: the target holds other rows than the source.
    """
    counts = {}
    with source.read() as conn:
        for table in metadata.sorted_tables:
            if table.name in OF_PROCESSES:
                continue
            counts[table.name] = _copy_table(conn, target, table, read)
            note(table.name, counts[table.name])
    return counts


def _copy_table(conn: sa.Connection, target: Database, table: sa.Table, read: Portions = portions) -> int:
    count = digest = 0
    for rows in read(conn, table):
        count, digest = count + len(rows), digest + sum(_digest(table, row) for row in rows)
        with target.write() as writing:
            if table is policies:  # the migration has stored a default policy, and the source has one of its own
                is_new = policies.c.policy_id == DEFAULT_POLICY, ~sa.exists().select_from(policy_versions)
                writing.execute(sa.delete(policies).where(*is_new))
            insert_new_rows(writing, table, [dict(row) for row in rows], "1")
    found_count = found_digest = 0
    with target.read() as reading:
        for rows in portions(reading, table):
            found_count, found_digest = found_count + len(rows), found_digest + sum(_digest(table, row) for row in rows)
    if (count, digest % 2**_DIGEST_BITS) != (found_count, found_digest % 2**_DIGEST_BITS):
        raise StoreError(
            f"table {table.name!r} has {count} rows in the source and {found_count} in the target, or other values: "
            "copy into a database that holds nothing else, and let no process write to it meanwhile"
        )
    if table.autoincrement_column is not None:
        with target.write() as writing:
            _continue_numbers(writing, table.autoincrement_column)
    return count


def _digest(table: sa.Table, row: Row) -> int:
    values = [
        bytes(value) if isinstance(value, memoryview) else value for value in map(row.__getitem__, table.c.keys())
    ]
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=_DIGEST_BITS // 8).digest())


def _continue_numbers(conn: sa.Connection, key: sa.Column[int]) -> None:
    """Let the database number the next row after the highest stored key, which a copy has brought."""
    if conn.dialect.name == "sqlite":
        return
    highest = sa.select(sa.func.max(key)).scalar_subquery()
    sequence = sa.func.pg_get_serial_sequence(key.table.name, key.name)
    conn.execute(sa.select(sa.func.setval(sequence, highest)).where(highest > 0))  # a default policy has 0


def back_up(database: Database, target: Path) -> None:
    """Copy an SQLite database to a new file as a consistent snapshot, during concurrent writes.

    Raises:
        SettingsError: the database is PostgreSQL, or the file exists or cannot be written.
    """
    if database.dialect != "sqlite":
        raise SettingsError("online backup is for SQLite; use `pg_dump --format custom` for PostgreSQL")
    if target.exists():
        raise SettingsError(f"{str(target)!r} exists; name a new file")
    database.check_schema()
    try:
        with replaced(target) as staged, database.read() as conn:
            create_private(staged)
            execute(conn, "VACUUM INTO ?", (str(staged),))
            synchronise(staged)  # SQLite does not
    except OSError as error:
        raise SettingsError(f"cannot write {str(target)!r}: {error.strerror}; name another file") from error
