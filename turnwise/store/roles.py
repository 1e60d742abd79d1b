"""Changes to the roles of stored turns, made because of later turns or by a person."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store import queries
from turnwise.store.statements import is_among
from turnwise.store.tables import turns
from turnwise.types import Role


def set_roles(conn: sa.Connection, turn_ids: Collection[str], role: Role, reason: str) -> None:
    """Set the role of these turns."""
    changed = sa.update(turns).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    conn.execute(changed.values(role=role.value, role_reason=reason))


def set_chain_role(conn: sa.Connection, tenant: str, turn_id: str, role: Role) -> list[str]:
    """Set the role of all turns in a turn's chain, with the reason `corrected`; return their ids.

    Raises:
        NotFound: this tenant has no such turn.
    """
    session_pk, _ = queries.place_of_turn(conn, turn_id, tenant)
    chain = sa.select(turns.c.chain_id).where(turns.c.turn_id == turn_id).scalar_subquery()
    in_chain = sa.select(turns.c.turn_id).where(turns.c.session_pk == session_pk, turns.c.chain_id == chain)
    turn_ids = list(conn.execute(in_chain.order_by(turns.c.seq)).scalars())
    set_roles(conn, turn_ids, role, "corrected")
    return turn_ids
