"""How many tokens a call's prompt has, before it is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.dialects.base import template_arguments
from proxy.sessions.conversation import has_media

if TYPE_CHECKING:
    from proxy.auth import Principal
    from proxy.dialects.base import Call
    from proxy.services import Services

COUNTED_FIELDS = ("tools", "add_generation_prompt", "continue_final_message")
"""Fields of a chat request beside its messages that the engine renders a prompt from."""


async def prompt_length(services: Services, call: Call, principal: Principal) -> int:
    """Return the number of tokens of a call's prompt, with the exact ids of the turn that it would extend."""
    await take_media(services, call)
    num_tokens = await services.sessions.continued_length(call, principal)
    return await rendered_length(services, call, principal) if num_tokens is None else num_tokens


async def rendered_length(services: Services, call: Call, principal: Principal) -> int:
    """Return the number of tokens of a call's messages, whose media were read, as an engine renders them."""
    engine = services.pool.route(principal.key_id)
    rendered = {field: call.body[field] for field in COUNTED_FIELDS if field in call.body}
    messages = call.messages if call.media is None else call.media.messages(call)
    rendered |= {"messages": messages, "model": engine.model}
    if arguments := template_arguments(call.body):
        rendered["chat_template_kwargs"] = arguments
    return len(await engine.tokenise(rendered))


async def take_media(services: Services, call: Call) -> None:
    if has_media(call.messages):
        await services.take_media(call)
