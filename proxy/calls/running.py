"""One call while it runs: its state, and the engine's reply, which is captured as it arrives.

A whole reply is one part, and a stream many. Parts that arrived together are handled together, and no part waits for a
later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import functools
import time
from collections.abc import Iterator

import msgspec
import orjson

from proxy.calls.capture import Timing
from proxy.calls.replays import RequestIdentity
from proxy.continuation.memory import Placement
from proxy.continuation.plan import Plan
from proxy.dialects import sse
from proxy.dialects.base import Call
from proxy.dialects.captured import Captured
from proxy.engines.answers import AnswerTooLong
from proxy.engines.engine import Lane
from turnwise.errors import EngineReplyTooLong, EngineUnavailable
from turnwise.types import Session


@dataclasses.dataclass(slots=True)
class Running:
    """A call with its session, its prompt and what the engine has answered so far."""

    call: Call
    placement: Placement
    plan: Plan
    identity: RequestIdentity
    call_id: str
    has_waited: bool = False
    """Whether the call has waited in vain for the proxy's first engine."""
    lane: Lane | None = None
    """The engine and weights that serve the call; None until the call is admitted."""
    captured: Captured = dataclasses.field(default_factory=Captured)
    created_at: datetime.datetime = dataclasses.field(
        default_factory=functools.partial(datetime.datetime.now, datetime.UTC)
    )
    started: float = dataclasses.field(default_factory=time.perf_counter)
    num_prompt_tokens: int = 0
    """Prompt tokens that the engine has echoed; counted when the turns are built, because a long prompt takes time."""
    first_token_at: float | None = None
    has_sent: bool = False
    """Whether events of a stream were sent to the client."""
    version_first: int = 0
    version_last: int = 0

    @property
    def session(self) -> Session:
        """The session that the call belongs to."""
        return self.placement.live.session

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason."""
        choices = self.captured.choices.values()
        return len(choices) >= self.call.num_choices and all(each.finish_reason is not None for each in choices)

    @property
    def turn_id(self) -> str:
        """The completion's id, as the engine derives it from the request id."""
        return f"{self.call.dialect.id_prefix}{self.call_id}"

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens so far."""
        return self.num_prompt_tokens + sum(len(choice.token_ids) for choice in self.captured.choices.values())

    def timing(self) -> Timing:
        """Return the times and policy versions of the call so far."""
        first = self.first_token_at
        return Timing(
            created_at=self.created_at,
            ttft_seconds=None if first is None else first - self.started,
            duration_seconds=time.perf_counter() - self.started,
            policy_version_first=self.version_first,
            policy_version_last=self.version_last,
            sampling=self.call.sampling if self.lane is None else self.lane.engine.effective_sampling(self.call),
            weights="" if self.lane is None else self.lane.model,
        )


class ClientLeft(Exception):
    """The client closed its connection before it had the whole reply."""


@contextlib.contextmanager
def cancelled_when_client_leaves(left: asyncio.Future[None]) -> Iterator[None]:
    """Cancel the block when the client closes its connection.

    Raises:
        ClientLeft: in place of the cancellation.
    """
    task = asyncio.current_task()
    assert task is not None, "the block runs in a task"

    def cancel(_: asyncio.Future[None]) -> None:
        if is_inside:
            task.cancel()

    is_inside = True
    left.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not left.done():
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        is_inside = False
        left.remove_done_callback(cancel)


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
    try:
        shown = lane.engine.read_reply(parts, running.captured, call, running.plan)
    except NOT_A_COMPLETION as error:
        raise not_a_completion(lane, error) from error
    if inside != requested:
        old, new = (b'"model":' + orjson.dumps(name) for name in (inside, requested))
        shown = [part.replace(old, new, 1) for part in shown]
    return shown
