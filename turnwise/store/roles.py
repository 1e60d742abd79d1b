"""Changes to the roles of stored turns, made because of later turns or by a person."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from turnwise.errors import NotFound
from turnwise.store.statements import is_among
from turnwise.store.tables import sessions, turns
from turnwise.types import Role


def set_roles(conn: sa.Connection, turn_ids: Collection[str], role: Role, reason: str) -> None:
    """Set the role of these turns."""
    changed = sa.update(turns).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    conn.execute(changed.values(role=role.value, role_reason=reason))


def set_chain_role(conn: sa.Connection, tenant: str, turn_id: str, role: Role) -> tuple[str, list[str]]:
    """Set the role of all turns in a turn's chain, with the reason `corrected`.

    Returns:
        The id of their session, and the ids of the turns.

    Raises:
        NotFound: this tenant has no such turn.
    """
    row = conn.execute(
        sa.select(turns.c.session_pk, turns.c.chain_id, sessions.c.session_id)
        .join_from(turns, sessions)
        .where(turns.c.turn_id == turn_id, sessions.c.tenant == tenant)
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no turn {turn_id!r}", param="turn_id")
    in_chain = sa.select(turns.c.turn_id).where(turns.c.session_pk == row.session_pk, turns.c.chain_id == row.chain_id)
    turn_ids = list(conn.execute(in_chain.order_by(turns.c.seq)).scalars())
    set_roles(conn, turn_ids, role, "corrected")
    return row.session_id, turn_ids
