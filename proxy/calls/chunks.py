"""Capture the events of an engine's stream, and encode them for the client.

Events that arrived together are handled together, and no event waits for a later one.
"""

from __future__ import annotations

import itertools
import time

import msgspec
import orjson

from proxy.calls.failures import not_a_completion
from proxy.calls.running import Running
from proxy.dialects import sse
from proxy.dialects.text_chunks import FIELDS
from proxy.engines.engine import Lane

CHOICES = b'"choices"'
"""Present in every chunk of a completion; an event without it is an error."""
NOT_A_COMPLETION = (msgspec.DecodeError, LookupError, TypeError)
"""What decoding a reply raises that is not a completion."""


def take(events: bytes, running: Running, lane: Lane) -> bytes:
    """Capture events that arrived together; return the events for the client.

    Raises:
        EngineUnavailable: one is not a chunk of a completion.
    """
    call, captured = running.call, running.captured
    found = call.dialect.find_text_chunks(events, captured, call) if events else None
    if found is None:
        return take_each(sse.data_of(events), running, lane)
    before = take_each(sse.data_of(found.before), running, lane) if found.before else b""
    captured.extend(found)
    _note_first_token(running, lane)
    (head,) = as_requested([captured.head], running, lane)
    parts, tail = found.shown(logprobs=call.wants_logprobs, token_ids=call.wants_token_ids)
    encoded = before + call.encoder.similar_chunks(head + FIELDS[found.field], parts, tail)
    return encoded + take_each(sse.data_of(found.after), running, lane) if found.after else encoded


def take_each(events: list[bytes], running: Running, lane: Lane) -> bytes:
    """Do the same with the data of events that are decoded.

    Raises:
        EngineUnavailable: one is not a chunk of a completion.
    """
    call, captured = running.call, running.captured
    is_over = events[-1:] == [sse.DONE]
    chunks = events[:-1] if is_over else events
    encoded = b""
    for is_error, together in itertools.groupby(chunks, lambda event: CHOICES not in event):
        if is_error:
            encoded += b"".join(map(call.encoder.error, together))
            continue
        try:
            shown = call.dialect.capture_chunks(as_requested(list(together), running, lane), captured, call)
        except NOT_A_COMPLETION as error:
            raise not_a_completion(lane, error) from error
        encoded += call.encoder.chunks(shown)
    _note_first_token(running, lane)
    return encoded + call.encoder.done() if is_over else encoded


def as_requested(replies: list[bytes], running: Running, lane: Lane) -> list[bytes]:
    """Return replies or chunks that name the model that the client asked for, without the echoed prompt ids."""
    if running.awaits_echo:
        replies = [running.cut_echo(reply) for reply in replies]
    inside, requested = lane.adapter or lane.engine.model, running.call.model or lane.engine.model
    if inside == requested:
        return replies
    old, new = (b'"model":' + orjson.dumps(name) for name in (inside, requested))
    return [reply.replace(old, new, 1) for reply in replies]


def _note_first_token(running: Running, lane: Lane) -> None:
    if running.first_token_at is None and any(choice.token_ids for choice in running.captured.choices.values()):
        running.first_token_at = time.perf_counter()
        running.version_first = lane.version
