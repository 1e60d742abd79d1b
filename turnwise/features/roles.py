"""The roles of stored turns, as they are found later, and as a person corrects those of a chain."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store.schema import turns
from turnwise.store.statements import is_among
from turnwise.store.turns import place_of_turn
from turnwise.types import Role


def set_chain_role(conn: sa.Connection, tenant: str, turn_id: str, role: Role) -> list[str]:
    """Set the role of all turns in a turn's chain, with the reason `corrected`; return their ids."""
    session_pk, _ = place_of_turn(conn, turn_id, tenant)
    chain = sa.select(turns.c.chain_id).where(turns.c.turn_id == turn_id).scalar_subquery()
    in_chain = sa.select(turns.c.turn_id).where(turns.c.session_pk == session_pk, turns.c.chain_id == chain)
    turn_ids = list(conn.execute(in_chain.order_by(turns.c.seq)).scalars())
    set_roles(conn, turn_ids, role, "corrected")
    return turn_ids


def set_roles(conn: sa.Connection, turn_ids: Collection[str], role: Role, reason: str) -> None:
    changed = sa.update(turns).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    conn.execute(changed.values(role=role.value, role_reason=reason))
