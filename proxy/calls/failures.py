"""The errors of a call whose engine failed, and the reason that its turn is stored with."""

from __future__ import annotations

from proxy.engines.answers import AnswerTooLong
from proxy.engines.engine import Lane
from turnwise.errors import EngineReplyTooLong, EngineUnavailable


def stored_reason(error: EngineUnavailable, otherwise: str) -> str:
    """Return the reason that the turn of a failed call is stored with."""
    return "engine_reply_too_long" if isinstance(error, EngineReplyTooLong) else otherwise


def not_a_completion(lane: Lane, error: Exception) -> EngineUnavailable:
    """Return the error of a reply that cannot be decoded."""
    return EngineUnavailable(
        f"the engine at {lane.engine.url} answered something that is no completion ({error}); retry"
    )


def too_long(lane: Lane, error: AnswerTooLong) -> EngineReplyTooLong:
    """Return the error of a reply over the limit of bytes."""
    return EngineReplyTooLong(
        f"the engine at {lane.engine.url} was cut off: {error}; ask for fewer tokens or a smaller `top_logprobs`, or "
        "raise `max_reply_bytes`"
    )


def broken_stream(lane: Lane) -> EngineUnavailable:
    """Return the error of a stream without an end."""
    return EngineUnavailable(
        f"the engine at {lane.engine.url} ended its stream early; what was sampled until then is stored, retry"
    )
