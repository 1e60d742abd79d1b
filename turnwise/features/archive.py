"""The rows of sessions as they leave the tables and come back, with new numbers; consent withdrawn meanwhile holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from turnwise.parts import parts_of_columns
from turnwise.store import extensions, schema
from turnwise.store.groups import is_group
from turnwise.store.rows import StoredRow
from turnwise.store.schema import (
    DELETED,
    groups,
    rewards,
    session_copies,
    sessions,
    trained_sessions,
    turns,
)
from turnwise.store.statements import insert_ignoring, insert_new_rows, is_among, sequence_of
from turnwise.types import Session, SessionStatus

Row = Mapping[str, Any]

OWN_TABLES = (turns, rewards, trained_sessions, session_copies)
ROWS_AT_ONCE = 256


def tables() -> dict[str, sa.Table]:
    """Return the tables of an archive by name."""
    return {table.name: table for table in (groups, sessions, *extensions.shared, *_of_sessions())}


def later_tables() -> set[str]:
    """Return the names of the tables of which older archives have no file."""
    return {table.name for pair in extensions.shared.items() for table in pair}


def _of_sessions() -> tuple[sa.Table, ...]:
    return (*OWN_TABLES, *extensions.shared.values(), *extensions.tables_of_sessions)


def _key(table: sa.Table, row: Row) -> tuple[Any, ...]:
    return tuple(row[column.name] for column in table.primary_key)


def select_rows(conn: sa.Connection, table_name: str, found: Sequence[StoredRow]) -> Iterator[Row]:
    """Yield the rows of a table that belong to these sessions, those of a session in the order of the primary key."""
    table = tables()[table_name]
    of = extensions.shared.get(table, table)
    key = table.c.group_pk if table is groups else of.c.session_pk
    wanted = {row.group_pk if table is groups else row.session_pk for row in found} - {None}
    if of is not table:
        own = table.primary_key.columns
        named = sa.select(*(of.c[column.name] for column in own)).where(is_among(conn.dialect, key, wanted))
        is_wanted: sa.ColumnElement[bool] = sa.tuple_(*own).in_(named)
        found_rows = sa.select(table).where(is_wanted).order_by(*own)
    else:
        is_wanted = is_among(conn.dialect, key, wanted)
        if table is groups:
            is_wanted = sa.or_(is_wanted, is_among(conn.dialect, groups.c.part_of, wanted))
        found_rows = sa.select(table).where(is_wanted).order_by(key, *table.primary_key)
    some = table.info.get(schema.ROWS_AT_ONCE, ROWS_AT_ONCE)
    for row in conn.execute(found_rows, execution_options={"yield_per": some}):
        yield dict(row._mapping)  # noqa: SLF001  SQLAlchemy's public name


def columns_of(table_name: str) -> dict[str, type]:
    return {column.name: column.type.python_type for column in tables()[table_name].c}


class ArchivedSession(NamedTuple):
    """One session with the rows that belong to it."""

    session: Row
    group: Row | None
    parts: Sequence[Row]
    """Those of its group."""
    others: Mapping[str, Sequence[Row]]
    shared: Sequence[tuple[sa.Table, Row]] = ()
    """The rows that it shares with other sessions, with their tables."""


def insert_session(conn: sa.Connection, archived: ArchivedSession) -> bool:
    """Store a session again; return False if a session of this tenant and id is stored."""
    row = {"key_id": None, "train": 1, "record": 1, **archived.session}
    named = {name: row[name] for name in ("tenant", "session_id", "user_id", "key_id", "continues")}
    found = [Session(**named, train=bool(row["train"]), record=bool(row["record"]))]
    for rule in extensions.opened:
        found = rule(conn, found)
    (marked,) = found
    row = {**row, "train": int(marked.train), "record": int(marked.record)}
    inserted = insert_new_rows(conn, sessions, [{**_without(row, "session_pk"), "group_pk": None}], "session_pk")
    if not inserted:
        return False
    ((session_pk,),) = inserted
    if archived.group is not None:
        joined = sa.update(sessions).where(sessions.c.session_pk == session_pk)
        group_pk = _join_group(conn, archived.group, row)
        conn.execute(joined.values(group_pk=group_pk))
        for part in archived.parts:
            _insert_group(conn, {**part, "part_of": group_pk})
    # After a deletion the turns of an earlier restoration wait for a sweep, and have these ids.
    turn_ids = [turn["turn_id"] for turn in archived.others.get(turns.name, ())]
    deleted = sa.select(sessions.c.session_pk).where(sessions.c.status == DELETED)
    conn.execute(
        sa.delete(turns).where(is_among(conn.dialect, turns.c.turn_id, turn_ids), turns.c.session_pk.in_(deleted))
    )
    for table, shared in archived.shared:
        insert_ignoring(conn, table, shared)
    for table_name, others in archived.others.items():
        key = "reward_id" if table_name == rewards.name else "session_pk"
        if table_name == turns.name:
            # The turns of an archive of before several policies are of their session's.
            others = [{"policy_id": row["policy_id"], **parts_of_columns(each)} for each in others]
        if others:
            conn.execute(
                sa.insert(tables()[table_name]),
                [{**_without(each, key), "session_pk": session_pk} for each in others],
            )
    sources = {copy["source_id"] for copy in archived.others.get(session_copies.name, ())}
    for follow in extensions.after_copy:
        follow(conn, (row["tenant"], row["session_id"]), sources)
    return True


def _join_group(conn: sa.Connection, group: Row, session: Row) -> int:
    """Count a session in its group; store the group if it has left the tables too. Return its row number."""
    _insert_group(conn, {**group, "num_sessions": 0, "num_finished": 0})
    is_finished = session["status"] != SessionStatus.OPEN and session["num_rewards"] > 0
    group_pk: int = conn.execute(
        sa.update(groups)
        .where(*is_group(group["tenant"], group["group_id"]))
        .values(num_sessions=groups.c.num_sessions + 1, num_finished=groups.c.num_finished + int(is_finished))
        .returning(groups.c.group_pk)
    ).scalar_one()
    return group_pk


def _insert_group(conn: sa.Connection, group: Row) -> None:
    """Store a group, or the part of one, if it has left the tables too.

    It gets its old row number, by which a trainer's replay buffer finds it, unless another group has it. On PostgreSQL
    it gets a new one too if this database has not assigned the number yet, since a later group would get it.
    """
    unnumbered = _without(group, "group_pk")
    is_assigned = group["group_pk"] <= _last_assigned(conn, groups.c.group_pk)
    if not (is_assigned and insert_ignoring(conn, groups, group)):
        insert_ignoring(conn, groups, unnumbered)


def _without(row: Row, name: str) -> dict[str, Any]:
    return {column: value for column, value in row.items() if column != name}


def grouped(rows_of: Mapping[str, Iterable[Row]]) -> Iterator[ArchivedSession]:
    """Yield the sessions of one batch with their rows from all tables, which are given by table name."""
    groups_by_pk, parts_of = {}, defaultdict(list)
    for row in rows_of[groups.name]:
        groups_by_pk[row["group_pk"]] = row
        parts_of[row.get("part_of")].append(row)
    others: dict[int, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for table in _of_sessions():
        for row in rows_of.get(table.name, ()):
            others[row["session_pk"]][table.name].append(row)
    shared = {table: {_key(table, row): row for row in rows_of.get(table.name, ())} for table in extensions.shared}
    for row in rows_of[sessions.name]:
        own, group_pk = others[row["session_pk"]], row["group_pk"]
        used = [
            (table, shared[table][_key(table, link)])
            for table, links in extensions.shared.items()
            for link in own.get(links.name, ())
        ]
        parts = [] if group_pk is None else parts_of[group_pk]
        yield ArchivedSession(row, groups_by_pk.get(group_pk), parts, own, used)


def _last_assigned(conn: sa.Connection, key: sa.Column[int]) -> float:
    """Return the highest number that the database has assigned as a key: no later row gets a number up to it."""
    if conn.dialect.name == "sqlite":
        return math.inf  # a new row gets the number after the highest one that is stored
    last = sa.select(sa.func.pg_sequence_last_value(sa.cast(sequence_of(key), postgresql.REGCLASS)))
    return conn.execute(last).scalar_one() or 0
