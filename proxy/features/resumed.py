"""Stored turns that a call names (`previous_response_id`, `conversation`) and continues without repeating them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.calls.earlier import read_turns
from proxy.calls.steps import CallStep
from proxy.features.formats.translated import Translated, TranslatedCall
from proxy.sessions.identities import EXPLICIT_SOURCES, next_id, next_prefix
from turnwise.errors import InvalidRequest, NotFound
from turnwise.features import resumed
from turnwise.features.consent import NOT_RECORDED
from turnwise.features.images import read_media
from turnwise.image_urls import image_digests
from turnwise.store import conversations

if TYPE_CHECKING:
    from proxy.auth import Principal
    from proxy.calls.capture import Running
    from proxy.services import Services
    from turnwise.store.database import Connection, Database


class Resumed(CallStep):
    """Puts what a call continues without repeating it before its messages."""

    dialects = frozenset({"responses", "messages"})

    def __init__(self, services: Services) -> None:
        self._database = services.database

    async def asked(self, running: Running) -> None:
        call = running.call
        assert isinstance(call, TranslatedCall)
        if call.previous_turn_id is not None or call.conversation_id is not None:
            await _resume(self._database, call, running.principal)


async def _resume(database: Database, call: TranslatedCall, principal: Principal) -> None:
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
        previous = await database.fetch(_newest_turn, principal.tenant, call.session_id, call.conversation_id)
    if previous is None:  # the first call of the conversation
        return
    earlier = (await read_turns(database, [previous], principal)).get(previous)
    if earlier is None or earlier.turn.reason == NOT_RECORDED:
        raise NotFound(
            f"previous response {previous!r} is not stored; send the whole conversation",
            code="previous_response_not_found",
        )
    assert isinstance(call.dialect, Translated)
    call.dialect.resume(call, earlier)
    if digests := image_digests(earlier.messages):
        session_id = earlier.turn.session_id
        call.images = await database.fetch(read_media, principal.tenant, digests, session_id=session_id)
    if call.conversation_id is None and call.session_source not in EXPLICIT_SOURCES:
        call.session_id, call.session_source = earlier.turn.session_id, "previous_response_id"


def _newest_turn(connection: Connection, tenant: str, session_id: str, conversation_id: str) -> str | None:
    """Return the newest turn with a whole reply in a conversation; None if it has none.

    Args:
        connection: an open transaction.
        tenant: of the session.
        session_id: the first session of the conversation.
        conversation_id: the conversation.
    """
    newest = conversations.newest_generation(connection, tenant, next_prefix(session_id))
    names = (next_id(session_id, number) for number in range(newest, 0, -1))
    found = (resumed.newest_in_conversation(connection, tenant, name, conversation_id) for name in names)
    return next(filter(None, found), None)
