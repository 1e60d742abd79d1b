"""The steps of a call whose conversation is changed: what of its edits applies, and the summary that it goes on from.

The summary of a call that has reached its threshold is a call of its own, in the same session, under the same key and
within the same place of the limits. Its tokens count to those of the call.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import msgspec

from proxy.calls.capture import Running, request_digest
from proxy.calls.steps import CallStep
from proxy.dialects.base import SYSTEM_ROLES, Call
from proxy.features.compaction.calls import Form, Managed, ManagedCall, Summary, ask, asking, go_on, said
from proxy.features.compaction.edits import TOKENS, Clearing, ClearThinking, Compact
from proxy.features.lengths import prompt_length, rendered_length, take_media
from proxy.routes.calls import SESSION, end
from turnwise.json_text import dumps

if TYPE_CHECKING:
    from proxy.auth import Principal
    from proxy.services import Services
    from turnwise.types import Json

CONTEXT_SHARE = 0.8
"""Of the engine's context, where a request names no threshold."""
RENDERED_BEYOND = 1_000
"""Tokens that a chat template may print beside the messages and tools, which have at most one token a byte."""
CLEARED_THINKING = "cleared_thinking"
"""Key of a turn's sampling that is true where thinking was cleared from its conversation."""


class ManageContext(CallStep):
    """Applies the edits of a call, and lets its reply show them."""

    dialects = frozenset({"responses", "messages"})

    def __init__(self, services: Services) -> None:
        self._services = services

    async def asked(self, running: Running) -> None:
        call = running.call
        if not isinstance(call, ManagedCall):
            return
        call.headers = running.reply_headers
        if call.session_id is None and call.continued is not None:
            call.session_id, call.session_source = call.continued, "compaction"
        for edit in call.edits:
            if isinstance(edit, Compact):
                await self._compact(running, call, edit)
            elif isinstance(edit, Clearing):
                if (applied := await clear(self._services, call, running.principal, edit)) and call.applied is not None:
                    call.applied.append(applied)
                if isinstance(edit, ClearThinking):
                    call.cleared = edit.older(call.messages)
                    call.notes = call.notes | ({CLEARED_THINKING: True} if call.cleared else {})
        assert isinstance(call.dialect, Managed)
        call.dialect.encode_with(call)

    async def _compact(self, running: Running, call: ManagedCall, edit: Compact) -> None:
        threshold = edit.threshold
        if threshold is None:
            threshold = CONTEXT_SHARE * self._services.pool.context_tokens()
        if not await reaches(self._services, call, running.principal, threshold):
            return
        if edit.pauses:
            ask(call, Form.REPLY, edit.prompt)
        else:
            kept = [message for message in call.messages if message.get("role") in SYSTEM_ROLES]
            go_on(call, await self._summarised(running, asking(call, edit.prompt)), kept)

    async def _summarised(self, running: Running, call: ManagedCall) -> Summary:
        """Sample the summary that a call asks for, or read it where the call repeats an earlier one.

        It is sampled in a task of its own: its turn is stored also if the client of the call leaves meanwhile.
        """
        sampling = asyncio.create_task(self._sampled(running, call))
        try:
            answer, session_id = await asyncio.shield(sampling)
        except asyncio.CancelledError:
            if not running.left.done():
                sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            raise
        reply = msgspec.json.decode(answer)
        text = said(reply["choices"][0].get("message"))
        return Summary(text, reply["id"], reply.get("usage") or {}, session_id)

    async def _sampled(self, running: Running, call: ManagedCall) -> tuple[bytes, str]:
        services, principal = self._services, running.principal
        own = Running(call=call, principal=principal, left=running.left, request_headers=running.request_headers)
        try:
            digest = request_digest(call, dumps(call.messages))
            attempt = await services.attempts.begin(call, principal, digest, running.left)
            if attempt.answer is None:
                own.attempt, attempt.headers = attempt, own.reply_headers
                await take_media(services, call)
                own.place = await services.sessions.find(call, principal, digest)
                own.session_key = own.place.live.key
                own.reply_headers[SESSION] = own.place.live.session.session_id
                own.answer = await services.relay.reply(own)
            return attempt.answer or own.answer or b"", attempt.headers[SESSION]
        finally:
            end(services, own)
            running.num_tokens += own.num_tokens


class ClearedThinking(CallStep):
    """Lets a call go on from no turn whose thinking was cleared: the turn's ids have it."""

    marks = frozenset({CLEARED_THINKING})

    def sent(self, running: Running) -> None:
        found, call = running.place, running.call
        if found.parent is None or not isinstance(call, ManagedCall):
            return
        path = found.forest.ancestors(found.parent)
        if any(turn.reasoning and turn.num_messages - 1 in call.cleared for turn in path):
            found.start_chain("edited_history")


async def clear(services: Services, call: Call, principal: Principal, edit: Clearing) -> Json | None:
    """Clear what an edit says from a call's messages; return what was cleared, None where the edit does not apply."""
    left, num_cleared = edit.cleared(call.messages)
    kind, amount = edit.at
    if not num_cleared:
        return None
    if kind == TOKENS:
        if not await reaches(services, call, principal, amount):
            return None
    elif sum(message.get("role") == "tool" for message in call.messages) < amount:
        return None
    before = await _rendered(services, call, principal, call.messages)
    num_tokens = max(0, before - await _rendered(services, call, principal, left))
    if num_tokens < edit.least_tokens:
        return None
    call.messages = left
    call.body = {**call.body, "messages": left}
    return {"type": edit.type, edit.counted: num_cleared, "cleared_input_tokens": num_tokens}


async def reaches(services: Services, call: Call, principal: Principal, num_tokens: float) -> bool:
    """Return whether a call's prompt has so many tokens; a short conversation is not rendered."""
    num_bytes = len(dumps([call.messages, call.tools]))
    if num_bytes + RENDERED_BEYOND < num_tokens:
        return False
    return not num_tokens or await prompt_length(services, await _copied(services, call), principal) >= num_tokens


async def _rendered(services: Services, call: Call, principal: Principal, messages: list[Json]) -> int:
    own = await _copied(services, call)
    own.messages = own.body["messages"] = messages
    await take_media(services, own)
    return await rendered_length(services, own, principal)


async def _copied(services: Services, call: Call) -> Call:
    """Return a copy of a call that can be counted, once an engine serves."""
    if not services.pool.serving:
        await services.pool.wait_for_first()
    return dataclasses.replace(call, body={**call.body}, notes={**call.notes})
