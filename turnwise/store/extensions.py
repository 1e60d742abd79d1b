"""What features add to the store: tables, columns, conditions, rules at a session's opening, what follows a change.

`turnwise.features` fills these lists from its tuple. The store calls them where its story says so, and knows no
feature; all of them may be empty.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import sqlalchemy as sa

from turnwise.credit import SessionCredit
from turnwise.errors import InvalidRequest
from turnwise.types import Json, PolicyVersion, Session, SessionKey, Turn

ReadColumn: TypeAlias = "Callable[[sa.Connection, str, str | None, Collection[Any] | None], Mapping[Any, Any]]"
"""Takes the connection, what the rows are (`Column.of`), their tenant or None for all, and the names to read or None
for all; returns the values by these names."""


KeyName: TypeAlias = tuple[str, str]
"""The tenant and the id of an API key."""
Condition: TypeAlias = "Callable[[Any, str | None], sa.ColumnElement[bool]]"
"""Takes a filter's field and its tenant; returns the condition on a session's row."""


class Column(NamedTuple):
    """A field that a feature adds to rows of lists."""

    name: str
    of: frozenset[str]
    """What has it: `session`, `key`, `policy` and `update`."""
    read: ReadColumn
    empty: Any
    """The value of a row that `read` returns none for."""
    kind: Any
    """Its type in answers."""
    description: str
    is_always_on: bool = False
    """Whether lists have it in each process; else only while the step of a call that names it is on."""


Findings: TypeAlias = "Callable[[sa.Connection, str | None], Iterable[tuple[str, str]]]"
"""Takes the connection and a tenant or None for all; yields what `turnwise doctor` says, each under a name."""
Opened: TypeAlias = "Callable[[sa.Connection, Sequence[Session]], list[Session]]"
"""Takes sessions that are about to be created; returns them as they are stored, in the same order."""


class GroupEvent(enum.StrEnum):
    """What may have happened to a group."""

    CLOSED = "closed"
    OPENED = "opened"
    REVISED = "revised"
    """A trained group is ready again."""
    GONE = "gone"


OfGroups: TypeAlias = "Callable[[sa.Connection, GroupEvent, Collection[int]], None]"


class Extension(NamedTuple):
    """One feature's part in the store."""

    opened: Opened | None = None
    """Its rule at the opening of sessions, in the transaction that creates them."""
    before_append: Callable[[Sequence[Any], Mapping[Any, Any], Mapping[str, int]], None] | None = None
    """Takes the rows of turns that are about to be stored, which it may change, the locked sessions by their keys, and
    how many tokens turns have that are stored: the rows' parents."""
    after_append: Callable[[sa.Connection, Sequence[Mapping[str, Any]]], None] | None = None
    """Takes the rows of turns that were just stored; what calls gave with them are further keys of the rows."""
    credited: Callable[[Sequence[Turn]], Sequence[Turn]] | None = None
    """Takes the turns of a session in order; returns them with the steps that they are credited with, and those that
    must not be trained as untrainable."""
    assigned: Callable[[Sequence[Turn], SessionCredit], SessionCredit] | None = None
    """Takes these turns and what each was credited with; returns that, with other returns."""
    after_deletion: Callable[[sa.Connection, Sequence[int]], None] | None = None
    """Takes the keys of sessions whose turns are to be deleted."""
    after_change: Callable[[sa.Connection, Session], None] | None = None
    """Takes a session whose end user has changed."""
    after_copy: Callable[[sa.Connection, SessionKey, Collection[str]], None] | None = None
    """Takes a session that holds copies of turns of other ones of its tenant, and their ids."""
    publishable: Callable[[sa.Connection, PolicyVersion], None] | None = None
    """Takes a version that is about to be published for the first time, and refuses it with an error."""
    of_keys: Callable[[sa.Connection, Sequence[KeyName]], Mapping[KeyName, Mapping[str, Any]]] | None = None
    """Takes API keys; returns other values of fields of `turnwise.store.keys.Key` for some of them."""
    of_groups: OfGroups | None = None
    """Takes groups by their keys, some of which something has happened to, in the transaction of that."""
    tables_of_tenants: tuple[sa.Table, ...] = ()
    """Tables whose rows go with their tenant, with a column `tenant`."""
    tables_of_sessions: tuple[sa.Table, ...] = ()
    """Tables whose rows are deleted with their session, with a column `session_pk`."""
    sweep: Callable[[sa.Connection, int], bool] | None = None
    """Deletes some of what only a deleted session has, by its key; returns whether there was any."""
    columns: tuple[Column, ...] = ()
    findings: Findings | None = None
    conditions: Mapping[str, Condition] = {}
    """By the field of `turnwise.store.selection.SessionFilter` that they are for."""


before_append: list[Callable[[Sequence[Any], Mapping[Any, Any], Mapping[str, int]], None]] = []
opened: list[Opened] = []
after_change: list[Callable[[sa.Connection, Session], None]] = []
after_copy: list[Callable[[sa.Connection, SessionKey, Collection[str]], None]] = []
of_keys: list[Callable[[sa.Connection, Sequence[KeyName]], Mapping[KeyName, Mapping[str, Any]]]] = []
of_groups: list[OfGroups] = []
publishable: list[Callable[[sa.Connection, PolicyVersion], None]] = []
after_append: list[Callable[[sa.Connection, Sequence[Mapping[str, Any]]], None]] = []
credited: list[Callable[[Sequence[Turn]], Sequence[Turn]]] = []
assigned: list[Callable[[Sequence[Turn], SessionCredit], SessionCredit]] = []
after_deletion: list[Callable[[sa.Connection, Sequence[int]], None]] = []
tables_of_tenants: list[sa.Table] = []
tables_of_sessions: list[sa.Table] = []
sweeps: list[Callable[[sa.Connection, int], bool]] = []
columns: list[Column] = []
findings: list[Findings] = []
conditions: dict[str, Condition] = {}


def use(extensions: Iterable[Extension]) -> None:
    """Let the store call these extensions, in their order, and no others."""
    found = list(extensions)
    before_append[:] = [each.before_append for each in found if each.before_append is not None]
    opened[:] = [each.opened for each in found if each.opened is not None]
    after_change[:] = [each.after_change for each in found if each.after_change is not None]
    after_copy[:] = [each.after_copy for each in found if each.after_copy is not None]
    of_keys[:] = [each.of_keys for each in found if each.of_keys is not None]
    of_groups[:] = [each.of_groups for each in found if each.of_groups is not None]
    publishable[:] = [each.publishable for each in found if each.publishable is not None]
    after_append[:] = [each.after_append for each in found if each.after_append is not None]
    credited[:] = [each.credited for each in found if each.credited is not None]
    assigned[:] = [each.assigned for each in found if each.assigned is not None]
    after_deletion[:] = [each.after_deletion for each in found if each.after_deletion is not None]
    tables_of_tenants[:] = [table for each in found for table in each.tables_of_tenants]
    tables_of_sessions[:] = [table for each in found for table in each.tables_of_sessions]
    columns[:] = [column for each in found for column in each.columns]
    sweeps[:] = [each.sweep for each in found if each.sweep is not None]
    findings[:] = [each.findings for each in found if each.findings is not None]
    conditions.clear()
    conditions.update(item for each in found for item in each.conditions.items())


def condition(name: str, value: Any, tenant: str | None) -> sa.ColumnElement[bool]:
    """Return the condition on a session's row for a field of a filter.

    Raises:
        InvalidRequest: this process uses no feature that filters by it.
    """
    if name not in conditions:
        raise InvalidRequest(f"sessions cannot be filtered by {name!r} here: the feature is not in use", param=name)
    return conditions[name](value, tenant)


def always_on() -> list[Column]:
    return [each for each in columns if each.is_always_on]


class ColumnValues(NamedTuple):
    """The values of some columns, by the names of rows."""

    of: list[tuple[Column, Mapping[Any, Any]]]

    def add(self, row: Json, name: Any) -> Json:
        return row | {column.name: values.get(name, column.empty) for column, values in self.of}


def read_columns(
    conn: sa.Connection,
    by: str,
    tenant: str | None,
    among: Collection[Any] | None = None,
    *,
    wanted: Sequence[Column] | None = None,
) -> ColumnValues:
    """Return the values that columns have for sessions, keys, policies or updates.

    Args:
        conn: the connection.
        by: what the rows are.
        tenant: whose rows; None for all.
        among: the rows' names; None for all.
        wanted: the columns; None for those that are always on, and of the others for those that have any value.
    """
    read = [
        (each, each.read(conn, by, tenant, among)) for each in (columns if wanted is None else wanted) if by in each.of
    ]
    return ColumnValues([(each, values) for each, values in read if values or wanted is not None or each.is_always_on])
