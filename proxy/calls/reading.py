"""Read the engine's reply as it arrives: capture it, and return what the client gets.

A whole reply is one part, and a stream many. Parts that arrived together are handled together, and no part waits for a
later one.
"""

from __future__ import annotations

import time

import msgspec
import orjson

from proxy.calls.failures import not_a_completion
from proxy.calls.running import Running
from proxy.dialects import sse
from proxy.engines.engine import Lane
from turnwise.errors import EngineUnavailable

CHOICES = b'"choices"'
"""Present in every chunk of a completion; an event without it is an error."""
NOT_A_COMPLETION = (msgspec.DecodeError, LookupError, TypeError)
"""What decoding a reply raises that is not a completion."""


def take_whole(reply: bytes, running: Running, lane: Lane) -> bytes:
    """Capture a whole reply; return it without the fields that the client did not ask for.

    Raises:
        EngineUnavailable: it is not a completion.
    """
    (shown,) = _take([reply], running, lane)
    return shown


def take_events(events: list[bytes], running: Running, lane: Lane) -> bytes:
    """Capture the events of a stream that arrived together; return the events for the client.

    Raises:
        EngineUnavailable: one is not a chunk of a completion.
    """
    call = running.call
    is_over = events[-1:] == [sse.DONE]
    chunks = events[:-1] if is_over else events
    encoded = _encode(chunks, running, lane) if chunks else b""
    if running.first_token_at is None and any(choice.token_ids for choice in running.captured.choices.values()):
        running.first_token_at = time.perf_counter()
        running.version_first = lane.version
    return encoded + call.encoder.done() if is_over else encoded


def _encode(chunks: list[bytes], running: Running, lane: Lane) -> bytes:
    """Return the events for the client; an engine reports an error in an event without choices."""
    try:
        return running.call.encoder.chunks(_take(chunks, running, lane))
    except EngineUnavailable:
        errors = [chunk for chunk in chunks if CHOICES not in chunk]
        if not errors:
            raise
    if len(chunks) == 1:
        return running.call.encoder.error(errors[0])
    return b"".join([_encode([chunk], running, lane) for chunk in chunks])


def _take(parts: list[bytes], running: Running, lane: Lane) -> list[bytes]:
    call = running.call
    inside, requested = lane.model, call.model or lane.engine.model
    if inside != requested:
        old, new = (b'"model":' + orjson.dumps(name) for name in (inside, requested))
        parts = [part.replace(old, new, 1) for part in parts]
    try:
        return lane.engine.read_reply(parts, running.captured, call, running.plan)
    except NOT_A_COMPLETION as error:
        raise not_a_completion(lane, error) from error
