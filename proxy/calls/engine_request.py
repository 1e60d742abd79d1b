"""The request of a call to its engine, and how much of the conversation it repeats.

An engine that gets the ids of a prompt neither renders nor tokenises the messages. So those of the turn that the call
extends are left out of a long request. They are sent where no check has shown that the engine samples after the ids,
where it may need them, and once more where it refuses the request or ignores the ids.
"""

from __future__ import annotations

from proxy.calls.capture import routing_request
from proxy.calls.running import Running
from proxy.continuation.plan import has_more_text
from proxy.dialects.base import Call, continues_final_message, encode_request
from proxy.engines.answers import Answer
from proxy.engines.engine import Lane
from proxy.engines.http_client import Body
from turnwise.errors import EngineRefused

OMITTED_CHARACTERS = 32 * 2**10
"""Messages with less text are sent again: they cost little."""
ENCODED_CHARACTERS = 2**20
"""New messages with more text are not encoded; then the client's own bytes of all messages are sent."""
INVALID = (400, 422)
"""Statuses of a refused request. The error that the client gets must name the place in all of its messages."""


async def post_call(running: Running, lane: Lane) -> Answer:
    """Send a call to its engine; if that refuses a request without the first messages, send all of them.

    Raises:
        EngineUnavailable: no connection, or one that broke before the answer's head.
        EngineRefused: an error status, with the engine's own body.
        InvalidRequest: the request would crash the engine.
    """
    route = running.call.dialect.engine_route
    try:
        return await lane.engine.post(route, *_request(running, lane))
    except EngineRefused as refused:
        if not running.num_omitted or refused.status not in INVALID:
            raise
    running.needs_all_messages = True
    return await lane.engine.post(route, *_request(running, lane))


def _request(running: Running, lane: Lane) -> tuple[Body, dict[str, str]]:
    """Return the body, in pieces, and the headers of the request to the engine."""
    call, prompt = running.call, running.plan.prompt
    running.sent_ids = None if prompt is None else prompt.json_pieces()
    running.num_omitted = _num_omitted(running, lane)
    body = call.dialect.engine_body(call, running.sent_ids, running.session.sampling, num_omitted=running.num_omitted)
    body["model"] = lane.adapter or lane.engine.model
    body |= routing_request(running.plan) if lane.engine.returns_routing else {}
    lane.engine.reject_prompt_logprobs(body)
    return encode_request(body), {"content-type": "application/json", "x-request-id": running.call_id}


def _num_omitted(running: Running, lane: Lane) -> int:
    """Return how many of the first messages are left out; at least one is sent."""
    plan, messages, pinned = running.plan, running.call.messages, running.session.sampling
    needs_all = running.needs_all_messages or lane.engine.needs_all_messages
    if needs_all or plan.prompt is None or plan.parent is None or continues_final_message(pinned):
        return 0
    if pinned.get("truncate_prompt_tokens") is not None:
        return 0
    num_omitted = min(plan.parent.num_messages, len(messages) - 1)
    is_long = _is_long(running.call, num_omitted)
    return num_omitted if is_long and not has_more_text(messages[num_omitted:], ENCODED_CHARACTERS) else 0


def _is_long(call: Call, num_messages: int) -> bool:
    """Return whether the first messages have enough text to be left out."""
    known = call.known_messages
    if known is not None and 0 < known.num_long <= num_messages:
        return True
    is_long = has_more_text(call.messages[:num_messages], OMITTED_CHARACTERS)
    if known is not None and is_long:
        known.num_long = num_messages
    return is_long
