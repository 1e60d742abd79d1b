"""How many tokens a call's prompt has, before it is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.dialects.base import template_arguments
from proxy.sessions.conversation import has_media
from turnwise.errors import PromptTooLong
from turnwise.types import SessionStatus

if TYPE_CHECKING:
    from proxy.auth import Principal
    from proxy.dialects.base import Call
    from proxy.services import Services
    from proxy.sessions.place import Sessions

COUNTED_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")
"""Fields of a chat request beside its messages that the engine renders a prompt from."""


async def prompt_length(services: Services, call: Call, principal: Principal) -> int:
    """Return the number of tokens of a call's prompt, with the exact ids of the turn that it would extend."""
    await take_media(services, call)
    num_tokens = await continued_length(services.sessions, call, principal)
    return await rendered_length(services, call, principal) if num_tokens is None else num_tokens


async def continued_length(sessions: Sessions, call: Call, principal: Principal) -> int | None:
    """Return the number of prompt tokens of a call that would extend a stored turn; None if it extends none.

    It stores nothing: a session that does not exist is not created.
    """
    caller, live, inferred_by = (principal.tenant, principal.key_id, call.policy_id), None, None
    if principal.session_id is not None:
        live = await sessions.cache.find_own(principal)
    elif call.session_id is not None:
        live = await sessions.cache.find_stored(principal.tenant, call.session_id)
    else:
        live, inferred_by = await sessions.unnamed.find(call, principal, caller), principal.key_id
    if live is None or live.session.status is not SessionStatus.OPEN:
        return None
    place = await sessions.place_in(live, call, principal, inferred_by)
    try:
        await sessions.plan(place, call)
    except PromptTooLong:
        return None
    finally:
        sessions.release(place)
    # The engine alone knows how many tokens content takes that is not text.
    return None if place.prompt is None or call.media is not None else place.prompt.num_ids


async def rendered_length(services: Services, call: Call, principal: Principal) -> int:
    """Return the number of tokens of a call's messages, whose media were read, as an engine renders them."""
    rendered = {field: call.body[field] for field in COUNTED_FIELDS if field in call.body}
    messages = call.messages if call.media is None else call.media.messages(call)
    rendered |= {"messages": messages}
    if arguments := template_arguments(call.body):
        rendered["chat_template_kwargs"] = arguments
    ids = await services.pool.ask(principal.key_id, lambda engine: engine.tokenise(rendered | {"model": engine.model}))
    return len(ids)


async def take_media(services: Services, call: Call) -> None:
    if has_media(call.messages):
        await services.take_media(call)
