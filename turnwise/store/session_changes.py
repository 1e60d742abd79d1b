"""Changes to an existing session, such as fields that its creator sends after the first call created it.

The fields that training reads can change while the session is open and its group accepts sessions; metadata and the
user can change at any time. If any of the given fields can no longer change, the request is a conflict and nothing
changes. The roles of stored turns change because of later turns, or by a person.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import sqlalchemy as sa

from turnwise.errors import Conflict, InvalidRequest
from turnwise.store import groups, lineage, queries, rows
from turnwise.store.statements import is_among
from turnwise.store.tables import session_labels, sessions, turns
from turnwise.types import Label, Role, Session, SessionStatus, Split

MAX_LABELS = 100
"""Maximum number of labels of one session."""
_GROUPING = frozenset({"group_id", "group_size", "split"})


def change_session(conn: sa.Connection, wanted: Session, given: Collection[str]) -> Session:
    """Apply the given fields to the stored session of this tenant and id; return it.

    Args:
        conn: A transaction of `Database.write`.
        wanted: The session with the wanted values.
        given: The names of the fields to apply; other fields do not change.

    Raises:
        NotFound: no such session.
        Conflict: one of the fields can no longer change.
    """
    row = queries.session_row(conn, wanted.tenant, wanted.session_id, lock=True)
    stored = rows.SESSIONS.record(row)
    changes = {name: getattr(wanted, name) for name in given if getattr(wanted, name) != getattr(stored, name)}
    if not changes:
        return queries.session(conn, wanted.tenant, wanted.session_id)
    if stored.status is not SessionStatus.OPEN:
        _reject_changes(changes.keys() - {"metadata", "user_id"}, stored, f"it is {stored.status.value}")
    values = rows.SESSIONS.values(changes)
    if _GROUPING & changes.keys():
        values["group_pk"] = _regroup(conn, row.group_pk, stored, dataclasses.replace(stored, **changes))
    conn.execute(sa.update(sessions).where(sessions.c.session_pk == row.session_pk).values(**values))
    if values.get("group_pk", row.group_pk) != row.group_pk:
        groups.leave(conn, [row.group_pk])
    return queries.session(conn, wanted.tenant, wanted.session_id)


def _regroup(conn: sa.Connection, group_pk: int | None, stored: Session, changed: Session) -> int | None:
    """Return the key of the session's group after the change."""
    if stored.group_id is not None and changed.group_id != stored.group_id:
        _reject_changes({"group_id"}, stored, f"it is in group {stored.group_id!r}")
    if changed.group_size is not None and changed.group_id is None:
        _reject_changes({"group_size"}, stored, "it has no group_id")
    if changed.split is Split.EVAL:
        return None
    if group_pk is None or changed.group_id != stored.group_id:
        return groups.join(conn, changed)
    if changed.group_size is not None:
        groups.set_size(conn, group_pk, changed)
    return group_pk


def _reject_changes(fields: Collection[str], session: Session, reason: str) -> None:
    """Raise a conflict that names the fields; do nothing without fields."""
    if fields:
        names = ", ".join(f"`{name}`" for name in sorted(fields))
        raise Conflict(
            f"session {session.session_id!r} exists and its {names} can no longer change: {reason}; create another",
            param=min(fields),
        )


def set_label(conn: sa.Connection, tenant: str, session_id: str, label: Label) -> Session:
    """Give a session a label, or replace the note of the label that it has; return the session.

    Raises:
        NotFound: no such session.
        InvalidRequest: the session has `MAX_LABELS` other labels.
    """
    session_pk = queries.session_row(conn, tenant, session_id, lock=True).session_pk
    others = session_labels.c.session_pk == session_pk, session_labels.c.label != label.label
    if conn.execute(sa.select(sa.func.count()).where(*others)).scalar_one() >= MAX_LABELS:
        raise InvalidRequest(f"session {session_id!r} has {MAX_LABELS} labels, which is the limit; remove one")
    _delete_label(conn, session_pk, label.label)
    conn.execute(sa.insert(session_labels).values(**rows.LABELS.row(label, session_pk=session_pk, tenant=tenant)))
    return queries.session(conn, tenant, session_id)


def remove_label(conn: sa.Connection, tenant: str, session_id: str, label: str) -> Session:
    """Remove a label from a session, if it has it; return the session.

    Raises:
        NotFound: no such session.
    """
    _delete_label(conn, queries.session_row(conn, tenant, session_id, lock=True).session_pk, label)
    return queries.session(conn, tenant, session_id)


def _delete_label(conn: sa.Connection, session_pk: int, label: str) -> None:
    own = session_labels.c.session_pk == session_pk, session_labels.c.label == label
    conn.execute(sa.delete(session_labels).where(*own))


def set_roles(conn: sa.Connection, turn_ids: Collection[str], role: Role, reason: str) -> None:
    """Set the role of these turns."""
    changed = sa.update(turns).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    conn.execute(changed.values(role=role.value, role_reason=reason))


def set_chain_role(conn: sa.Connection, tenant: str, turn_id: str, role: Role) -> list[str]:
    """Set the role of all turns in a turn's chain, with the reason `corrected`; return their ids.

    Raises:
        NotFound: this tenant has no such turn.
    """
    session_pk, _ = lineage.place_of_turn(conn, turn_id, tenant)
    chain = sa.select(turns.c.chain_id).where(turns.c.turn_id == turn_id).scalar_subquery()
    in_chain = sa.select(turns.c.turn_id).where(turns.c.session_pk == session_pk, turns.c.chain_id == chain)
    turn_ids = list(conn.execute(in_chain.order_by(turns.c.seq)).scalars())
    set_roles(conn, turn_ids, role, "corrected")
    return turn_ids
