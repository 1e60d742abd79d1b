"""Stored turns that a request names: which of them its caller may read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from proxy.auth import Principal
from turnwise.errors import NotFound
from turnwise.store import turns
from turnwise.store.database import Connection, Database
from turnwise.store.turns import TurnView


async def read_turns(database: Database, turn_ids: Sequence[str], principal: Principal) -> dict[str, TurnView]:
    """Return those of the turns that the caller may read: of its tenant, and of a session key's own session."""

    def read(connection: Connection) -> dict[str, TurnView]:
        found = {}
        for turn_id in dict.fromkeys(turn_ids):
            with contextlib.suppress(NotFound):
                found[turn_id] = turns.read_turn(connection, principal.tenant, turn_id)
        return found

    views = await database.fetch(read)
    own = principal.session_id
    return {turn_id: view for turn_id, view in views.items() if own is None or view.turn.session_id == own}
