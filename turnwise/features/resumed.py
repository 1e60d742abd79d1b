"""Which stored turn a conversation of the Responses API goes on from."""

from __future__ import annotations

import json

import sqlalchemy as sa

from turnwise.features.consent import NOT_RECORDED
from turnwise.store.schema import sessions, turns
from turnwise.store.selection import is_session
from turnwise.types import Outcome

_WHOLE = [outcome.value for outcome in Outcome if outcome not in (Outcome.ABORTED, Outcome.ERROR)]


def newest_in_conversation(conn: sa.Connection, tenant: str, session_id: str, conversation_id: str) -> str | None:
    """Return a session's newest turn with a whole reply in a conversation of the Responses API; None if it has none.

    The conversation is stored with the sampling parameters of its turns; a turn that is not recorded may be of it.
    """
    newest_first = conn.execute(
        sa.select(turns.c.turn_id, turns.c.sampling, turns.c.reason)
        .join_from(turns, sessions)
        .where(*is_session(tenant, session_id), turns.c.outcome.in_(_WHOLE))
        .order_by(turns.c.seq.desc())
    )
    of_it = (
        row.turn_id
        for row in newest_first
        if row.reason == NOT_RECORDED or json.loads(row.sampling).get("conversation") == conversation_id
    )
    return next(of_it, None)
