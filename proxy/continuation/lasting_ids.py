"""Ids that an application keeps when their session is over: sessions `id`, `id~2`, `id~3`, in this order.

A conversation of the Responses API is such an id. The client does not repeat its messages, so they are read from its
newest turn in any of these sessions.
"""

from __future__ import annotations

import itertools

from turnwise.store import history
from turnwise.store.database import Database

MAX_NAME = 240
"""Characters of a session id that its continuations keep; a number follows."""


def next_id(session_id: str, number: int) -> str:
    """Return the id of the `number`-th session of an application's id; the second is the first with a suffix."""
    return f"{session_id[:MAX_NAME]}~{number}"


def newest_turn(database: Database, tenant: str, session_id: str, conversation_id: str) -> str | None:
    """Return the newest turn with a whole reply in a conversation; None if it has none.

    Args:
        database: the store.
        tenant: of the session.
        session_id: the first session of the conversation.
        conversation_id: the conversation.
    """
    newest = None
    with database.read() as connection:
        for number in itertools.count(1):
            name = session_id if number == 1 else next_id(session_id, number)
            exists, turn_id = history.newest_in_conversation(connection, tenant, name, conversation_id)
            if not exists:
                return newest
            newest = turn_id or newest
    raise AssertionError("an endless count has ended")
