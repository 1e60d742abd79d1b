"""One call from the canonical request to the reply's last byte: request → plan → relay → commit → reply.

One decision: the last byte waits for the commit. A whole reply leaves after it; a stream flows as it comes, and only
what tells the client that it is complete, from the finishing chunk on, is held back until the turn is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
import orjson

from proxy.auth import Principal
from proxy.calls import capture
from proxy.continuation.chat_template import ChatTemplate
from proxy.continuation.plan import Plan
from proxy.continuation.sessions import LiveSession, Sessions
from proxy.dialects import sse
from proxy.dialects.base import Call, Captured
from proxy.engines.http_client import Disconnected
from proxy.engines.pool import EnginePool, Lane
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.writer.client import Writer
from proxy.writer.process import Ending, Sampled
from turnwise.errors import EngineRefused, EngineUnavailable
from turnwise.store import queries
from turnwise.store.database import Database
from turnwise.types import Turn, utc_now

log = logging.getLogger(__name__)
T = TypeVar("T")
Send = Callable[[bytes], Coroutine[Any, Any, None]]
CHOICES = b'"choices"'
"""What every chunk of a completion has; an event without it tells of an error."""


class ClientLeft(Exception):
    """The client went away; nobody waits for the reply any more."""


@dataclasses.dataclass(slots=True)
class Running:
    """One call on its way."""

    call: Call
    live: LiveSession
    plan: Plan
    lane: Lane
    """What it samples with; chosen anew when it has waited out a reload."""
    call_id: str
    captured: Captured = dataclasses.field(default_factory=Captured)
    created_at: Any = dataclasses.field(default_factory=utc_now)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    version_first: int = 0
    version_last: int = 0

    @property
    def turn_id(self) -> str:
        """The completion's id, as the engine makes it from the request id."""
        return f"{self.call.dialect.id_prefix}{self.call_id}"

    def timing(self) -> capture.Timing:
        """Return when its parts happened so far, and under which weights."""
        first = self.first_token_at
        return capture.Timing(
            created_at=self.created_at,
            ttft_seconds=None if first is None else first - self.started,
            duration_seconds=time.perf_counter() - self.started,
            policy_version_first=self.version_first,
            policy_version_last=self.version_last,
        )


class Relay:
    """Serves calls."""

    def __init__(
        self,
        database: Database,
        pool: EnginePool,
        sessions: Sessions,
        writer: Writer,
        metrics: Metrics,
        faults: FaultPoints | None = None,
    ) -> None:
        self._faults = faults or FaultPoints()
        self._database = database
        self._pool = pool
        self._sessions = sessions
        self._writer = writer
        self._metrics = metrics
        self.template: ChatTemplate | None = None
        """The served model's chat template; None until an engine was found that tells."""

    async def begin(self, call: Call, principal: Principal, call_id: str) -> Running:
        """Find the call's session, plan its prompt and choose its engine."""
        live = await self._sessions.of_call(call, principal)
        plan = await self._sessions.plan(live, call, self.template)
        lane = self._pool.lane(live.session)
        running = Running(call, live, plan, lane, call_id)
        running.version_first = running.version_last = lane.version
        return running

    async def stored_turns(self, running: Running) -> list[Turn]:
        """Return the turns, one per choice, that a call under the same `Idempotency-Key` left in the store."""
        call, session, key = running.call, running.live.session, running.call.idempotency_key
        if key is None:
            return []

        def read() -> list[Turn]:
            with self._database.read() as connection:
                found = [
                    queries.turn_by_request(
                        connection, session.tenant, session.session_id, capture.request_key(key, index)
                    )
                    for index in range(call.num_choices)
                ]
            return [turn for turn in found if turn is not None and turn.finish_reason is not None]

        turns = await asyncio.to_thread(read)
        return turns if len(turns) == call.num_choices else []

    async def whole(self, running: Running, left: asyncio.Future[None]) -> bytes:
        """Return the reply's body, stripped to what the client asked for, once its turns are stored.

        Raises:
            ClientLeft: the client went first.
            EngineError, StoreError, Overloaded: no reply, or none that could be stored.
        """
        return await self._accounted(running, self._whole(running, left))

    async def _whole(self, running: Running, left: asyncio.Future[None]) -> bytes:
        call, lane = running.call, running.lane
        running.version_first = lane.version
        with stopped_by(left):
            raw = await self._read_whole(running)
        running.version_last = lane.version
        with readable(lane):
            running.captured, reply = call.dialect.capture_reply(own_name(raw, lane), call)
        await self._commit(running)
        return call.dialect.encode_reply(reply, call)

    async def _read_whole(self, running: Running) -> bytes:
        with await running.lane.engine.post(running.call.dialect.engine_route, *self._request(running)) as answer:
            try:
                return await answer.read()
            except Disconnected as error:
                raise EngineUnavailable(
                    f"the engine at {running.lane.engine.url} broke off its reply; retry"
                ) from error

    async def stream(self, running: Running, send: Send, left: asyncio.Future[None]) -> None:
        """Send the reply's events as they come; the finishing ones once the turns are stored.

        Raises:
            ClientLeft: the client went first; what was sampled until then is stored.
            EngineError, StoreError, Overloaded: as `whole`; events may have been sent by then.
        """
        await self._accounted(running, self._stream(running, send, left))

    async def _stream(self, running: Running, send: Send, left: asyncio.Future[None]) -> None:
        held = b""
        with stopped_by(left):
            async for events in self._events(running):
                shown = self._take_events(events, running)
                if running.captured.is_finished(running.call.num_choices):
                    held += shown
                elif shown:
                    await send(shown)
                    self._faults.point("mid_stream")
        await self._commit(running)
        await send(held)

    async def _events(self, running: Running) -> AsyncIterator[list[bytes]]:
        """Yield the engine's events as they come, those of one read together, to the end of a whole stream."""
        lane = running.lane
        running.version_first = lane.version
        buffer = sse.EventBuffer()
        with await lane.engine.post(running.call.dialect.engine_route, *self._request(running)) as answer:
            try:
                async for data in answer.parts():
                    running.version_last = lane.version
                    yield buffer.feed(data)
            except Disconnected as error:
                raise EngineUnavailable(f"the engine at {lane.engine.url} broke off its stream; retry") from error
        if buffer.pending or not running.captured.is_finished(running.call.num_choices):
            raise EngineUnavailable(
                f"the engine at {lane.engine.url} broke off its stream; what came of it is stored, retry"
            )

    def _take_events(self, events: list[bytes], running: Running) -> bytes:
        """Capture events that came together; return what to tell the client."""
        call, captured, lane = running.call, running.captured, running.lane
        is_over = events[-1:] == [sse.DONE]
        chunks = events[:-1] if is_over else events
        failures = [event for event in chunks if CHOICES not in event]
        if failures:
            chunks = [event for event in chunks if CHOICES in event]
        with readable(lane):
            if lane.adapter is not None:
                chunks = [own_name(chunk, lane) for chunk in chunks]
            shown = call.dialect.capture_chunks(chunks, captured, call)
        if running.first_token_at is None and any(choice.token_ids for choice in captured.choices.values()):
            running.first_token_at = time.perf_counter()
            running.version_first = lane.version
        told = call.encoder.chunks(shown) + b"".join(map(call.encoder.error, failures))
        return told + call.encoder.done() if is_over else told

    def _request(self, running: Running) -> tuple[bytes, dict[str, str]]:
        self._faults.point("before_engine")
        call, plan = running.call, running.plan
        body = call.dialect.engine_body(call, plan.prompt_token_ids, running.live.session.sampling)
        lane = running.lane
        if lane.adapter is not None and call.model in ("", lane.engine.model):
            body["model"] = lane.adapter
        lane.engine.reject_prompt_logprobs(body)
        encoded = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return encoded, {"content-type": "application/json", "x-request-id": running.call_id}

    async def _commit(self, running: Running, *, aborted: str | None = None) -> None:
        """Store the call's turns, then let the session remember them."""
        sampled = capture.build_turns(
            running.call,
            running.plan,
            running.captured,
            running.timing(),
            turn_id=running.turn_id,
            session=running.live.session,
            aborted=aborted,
        )
        self._faults.point("before_commit")
        endings = await self._writer.append(sampled)
        self._faults.point("after_commit_before_reply")
        self._sessions.remember(
            running.live,
            [capture.known_turn(turn, running.plan) for turn, _ in sampled if len(turn.token_ids)],
            inferred_for=running.call.inferred_by,
        )
        self._count(running, endings)

    def _count(self, running: Running, endings: list[Ending]) -> None:
        metrics = self._metrics
        for ending in endings:
            metrics.turns_of(ending.outcome.value, ending.reason or "").inc()
        metrics.tokens_of("sampled").inc(sum(len(each.token_ids) for each in running.captured.choices.values()))
        metrics.tokens_of("prompt").inc(len(running.captured.prompt_token_ids))
        if running.plan.reason is not None:
            metrics.breaks.labels(running.plan.reason).inc()
        if running.first_token_at is not None:
            metrics.ttft_seconds.observe(running.first_token_at - running.started)

    async def _accounted(self, running: Running, work: Coroutine[Any, Any, T]) -> T:
        """Do the work in a lane; what comes to no end is stored and counted as what it was, once."""
        try:
            running.lane = await self._pool.admit(running.live.session)
            try:
                return await work
            finally:
                self._pool.release(running.lane)
        except ClientLeft:
            await self._commit(running, aborted="client_left")
            raise
        except EngineRefused as refused:
            await self._commit_error(running, f"engine_{refused.status}")
            raise
        except EngineUnavailable:
            if running.captured.choices:
                await self._commit(running, aborted="engine_broke_off")
            else:
                await self._commit_error(running, "engine_unavailable")
            raise
        finally:
            work.close()
            mode = "stream" if running.call.stream else "whole"
            self._metrics.call_seconds_of(mode).observe(time.perf_counter() - running.started)

    async def _commit_error(self, running: Running, reason: str) -> None:
        running.version_first = running.version_last = running.lane.version
        turn = capture.failed_turn(
            running.call, running.timing(), reason, turn_id=running.turn_id, session=running.live.session
        )
        await self._writer.append([Sampled(turn, [])])
        self._metrics.turns_of("error", reason).inc()


def own_name(said: bytes, lane: Lane) -> bytes:
    """Return a reply or chunk naming the model that the client asked for: which adapter served it is our affair."""
    if lane.adapter is None:
        return said
    return said.replace(f'"model":"{lane.adapter}"'.encode(), b'"model":' + orjson.dumps(lane.engine.model), 1)


@contextlib.contextmanager
def readable(lane: Lane) -> Iterator[None]:
    """Read what an engine said.

    Raises:
        EngineUnavailable: it is no completion, so the engine is not what it was.
    """
    try:
        yield
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise EngineUnavailable(f"the engine at {lane.engine.url} answered no completion ({error}); retry") from error


class stopped_by:  # noqa: N801  used like a function
    """Cancel the block when the client leaves, so that the engine stops its work too.

    Raises:
        ClientLeft: it left.
    """

    __slots__ = ("_is_inside", "_left", "_task")

    def __init__(self, left: asyncio.Future[None]) -> None:
        self._left = left

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._is_inside = True
        self._left.add_done_callback(self._stop)

    def _stop(self, _: asyncio.Future[None]) -> None:
        if self._is_inside and self._task is not None:
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_inside = False
        self._left.remove_done_callback(self._stop)
        if kind is asyncio.CancelledError and self._task is not None and self._left.done():
            self._task.uncancel()
            raise ClientLeft from None
