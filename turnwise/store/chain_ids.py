"""Chain ids, assigned at commit: if several turns extend one turn at the same time, one of them continues its chain."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from turnwise.store.statements import fetch_rows
from turnwise.store.tables import turns

_HAS_CHILD = (
    "EXISTS (SELECT 1 FROM turns AS child WHERE child.session_pk = turns.session_pk AND child.seq > turns.seq "
    "AND child.parent_turn_id = turns.turn_id)"
)
"""Whether a turn extends this one; it reads only later turns of the session."""


class ChainIds:
    """Assigns chain ids to a batch of turns."""

    def __init__(self, conn: sa.Connection, parent_ids: Iterable[str | None]) -> None:
        """Read the chains of the stored parents; their sessions are locked."""
        parents = {parent_id for parent_id in parent_ids if parent_id is not None}
        columns = ("turn_id", "session_pk", "chain_id", _HAS_CHILD)
        found = fetch_rows(conn, turns, columns, {"turn_id": list(parents)}) if parents else []
        self.session_of_parent: dict[str, int] = {turn_id: session_pk for turn_id, session_pk, _, _ in found}
        """Sessions of the stored parents."""
        self._last_of_chain: dict[str, str] = {
            turn_id: chain_id for turn_id, _, chain_id, has_child in found if not has_child
        }
        """Chain ids of turns that no turn extends."""

    def assign(self, turn_id: str, parent_id: str | None) -> str:
        """Return the chain id of a new turn: its parent's if it is the first child, else its own turn id."""
        chain_id = turn_id if parent_id is None else self._last_of_chain.pop(parent_id, turn_id)
        self._last_of_chain[turn_id] = chain_id
        return chain_id
