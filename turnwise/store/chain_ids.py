"""Chain ids, assigned at commit: if several turns extend one turn at the same time, one of them continues its chain."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from turnwise.store.statements import fetch_at_once, is_among, members
from turnwise.store.tables import turns


class ChainIds:
    """Assigns chain ids to a batch of turns."""

    def __init__(self, conn: sa.Connection, parent_ids: Iterable[str | None]) -> None:
        """Read the chains of the stored parents; their sessions are locked."""
        dialect = conn.dialect.name
        parents = {parent_id for parent_id in parent_ids if parent_id is not None}
        found = fetch_at_once(conn, _select_parents(dialect), {"ids": members(dialect, parents)}) if parents else []
        self._last_of_chain: dict[str, str] = {
            turn_id: chain_id for turn_id, chain_id, children in found if not children
        }
        """Chain ids of turns that no turn extends."""

    def assign(self, turn_id: str, parent_id: str | None) -> str:
        """Return the chain id of a new turn: its parent's if it is the first child, else its own turn id."""
        chain_id = turn_id if parent_id is None else self._last_of_chain.pop(parent_id, turn_id)
        self._last_of_chain[turn_id] = chain_id
        return chain_id


@functools.cache
def _select_parents(dialect: str) -> sa.Select[*tuple[Any, ...]]:
    """Return the statement for ids, chains and the number of children; it reads only later turns of the session."""
    child = turns.alias()
    children = (
        sa.select(sa.func.count())
        .where(
            child.c.session_pk == turns.c.session_pk,
            child.c.seq > turns.c.seq,
            child.c.parent_turn_id == turns.c.turn_id,
        )
        .correlate(turns)
        .scalar_subquery()
        .label("children")
    )
    return sa.select(turns.c.turn_id, turns.c.chain_id, children).where(is_among(dialect, turns.c.turn_id, "ids"))
