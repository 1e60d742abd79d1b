"""Whether this release can use the tables of a newer one.

Migrations only add, so during an upgrade processes of the older release run, and start, on the newer tables. The tables
themselves show whether that holds: they have every column that this release names, and demand a value in no other.
"""

from __future__ import annotations

import sqlalchemy as sa

from turnwise.store.tables import metadata


def find_obstacles(conn: sa.Connection, wanted: sa.MetaData = metadata) -> list[str]:
    """Return what in the tables prevents a release that declares `wanted` from using them; nothing if it can."""
    inspector = sa.inspect(conn)
    existing = set(inspector.get_table_names())
    found = []
    for name, table in sorted(wanted.tables.items()):
        if name not in existing:
            found.append(f"the table {name} is missing")
            continue
        columns = {column["name"]: column for column in inspector.get_columns(name)}
        names = [column.name for column in table.c]
        found += [f"the column {name}.{column} is missing" for column in names if column not in columns]
        found += [
            f"the column {name}.{column} is unknown and requires a value"
            for column, described in columns.items()
            if column not in names and not described["nullable"] and described["default"] is None
        ]
    return found
