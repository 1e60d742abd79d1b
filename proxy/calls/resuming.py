"""Stored turns that a call names (`previous_response_id`, `conversation`) and continues without repeating them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.sessions.which import EXPLICIT_SOURCES, newest_turn
from turnwise.errors import InvalidRequest, NotFound
from turnwise.store import turns
from turnwise.store.database import Connection, Database
from turnwise.store.media import read_media
from turnwise.store.turns import TurnView
from turnwise.types import NOT_RECORDED, image_digests


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


async def resume(database: Database, call: Call, principal: Principal) -> None:
    """Put the conversation that a call continues without repeating it before the call's messages.

    The previous turn that a call names also names its session; a `conversation` is looked up in the call's session.

    Raises:
        InvalidRequest: the session of a `conversation` is not known, because `ignored_ids` turns its id off.
        NotFound: the previous turn is not stored.
    """
    previous = call.previous_turn_id
    if call.conversation_id is not None:
        if call.session_id is None:
            raise InvalidRequest(
                "`conversation` is not served, because the setting `ignored_ids` contains it; send the "
                "conversation as `input`",
                param="conversation",
            )
        previous = await database.fetch(newest_turn, principal.tenant, call.session_id, call.conversation_id)
    if previous is None:  # the first call of the conversation
        return
    earlier = (await read_turns(database, [previous], principal)).get(previous)
    if earlier is None or earlier.turn.reason == NOT_RECORDED:
        raise NotFound(
            f"previous response {previous!r} is not stored; send the whole conversation",
            code="previous_response_not_found",
        )
    call.dialect.resume(call, earlier)
    if digests := image_digests(earlier.messages):
        session_id = earlier.turn.session_id
        call.images = await database.fetch(read_media, principal.tenant, digests, session_id=session_id)
    if call.conversation_id is None and call.session_source not in EXPLICIT_SOURCES:
        call.session_id, call.session_source = earlier.turn.session_id, "previous_response_id"
