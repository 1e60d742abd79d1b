"""One call from the canonical request to the reply's last byte: plan, sampling, commit, and which bytes wait for it.

The last byte waits for the commit. A whole reply is sent after the commit. A stream is sent as it arrives; only the
events that tell the client that it is complete, from the finishing chunk on, are held until the turn is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from proxy.calls import capture
from proxy.calls.capture import Attempts, EventBuffer, Running, take_events
from proxy.calls.steps import EVERY_CALL, Steps
from proxy.dialects.base import Call
from proxy.engines.engine import Lane
from proxy.engines.http_client import Answer, AnswerTooLong, Broken, Disconnected, NotConnected
from proxy.engines.pool import EnginePool
from proxy.fault import FaultPoints
from proxy.http import problems
from proxy.http.asgi import cancelled_when_client_leaves
from proxy.metrics import Metrics
from proxy.sessions.place import Sessions
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from proxy.writer.process import NewTurn
from turnwise.errors import (
    ClientLeft,
    Conflict,
    EngineRefused,
    EngineReplyTooLong,
    EngineUnavailable,
    NotFound,
    PromptTooLong,
    ProxyUnavailable,
    SessionDeleted,
    StoreError,
    TurnwiseError,
)
from turnwise.store import turns as stored_turns

log = logging.getLogger(__name__)
Send = Callable[[bytes], Coroutine[Any, Any, None]]
NOT_STORED = "not_stored"
"""Reason of a call whose turn is not known to be stored, in the metric alone."""
LOST_TOGETHER_SECONDS = 1.0
"""How long a call waits that its engine broke off: engines of one host are lost together, and are noticed by then."""
STOPPING = "the proxy is stopping and cut this call off; retry: what was sampled until then is stored"


async def _send_nothing(_: bytes) -> None:
    """Stand for the client of a whole reply, which gets no part of it early."""


def _cut_off(url: str, call: Call, error: Disconnected) -> EngineUnavailable:
    if isinstance(error, AnswerTooLong):
        return EngineReplyTooLong(
            f"the engine at {url} was cut off: {error}; ask for fewer tokens or a smaller `top_logprobs`, or raise "
            "`max_reply_bytes`"
        )
    problem = "ended its stream early; what was sampled until then is stored"
    if not call.stream:
        problem = "closed the connection before its reply was complete"
    return EngineUnavailable(f"the engine at {url} {problem}, retry")


class Relay:
    """Serves calls."""

    def __init__(
        self,
        pool: EnginePool,
        sessions: Sessions,
        attempts: Attempts,
        steps: Steps,
        writer: Writer,
        settings: ProxySettings,
        metrics: Metrics,
        faults: FaultPoints,
    ) -> None:
        self._faults = faults
        self._pool = pool
        self._sessions = sessions
        self._attempts = attempts
        self._steps = steps
        self._writer = writer
        self._metrics = metrics
        self._max_reply_bytes = settings.max_reply_bytes

    async def reply(self, running: Running, send: Send = _send_nothing) -> bytes:
        """Return the whole reply, or the finishing events of a stream, once its turns are stored.

        A call under an `Idempotency-Key` whose reply is stored gets that. Any other call is stored and counted with one
        outcome, whatever happens; if it cannot be stored it is counted as that.

        Args:
            running: the call.
            send: gets the earlier events of a stream as they arrive.

        Raises:
            ClientLeft: the client closed its connection; what was sampled until then is stored.
            Conflict: the `Idempotency-Key` was used with another request, or another process has stored its reply under
                it while events were sent, or that reply is not whole.
            TurnwiseError: no reply, a reply that broke off, or one that could not be stored; events may have been sent
                by then.
            ProxyUnavailable: the server cancelled the call because it stops.
        """
        call = running.call
        if not call.train:
            for step in self._steps.denied:
                await step(running)
        if call.idempotency_key is not None and (answer := await self._repeated(running)) is not None:
            self._metrics.coalesced.inc()
            return answer
        try:
            try:
                with cancelled_when_client_leaves(running.left):
                    held = await self._sample(running, send)
                turns = capture.build_turns(running)
            except BaseException as error:
                await self._record_failure(running, error)
                raise
            is_first = await self._commit(running, turns)
        except asyncio.CancelledError as error:  # by the server, when it stops and its drain time is over
            raise ProxyUnavailable(STOPPING) from error
        finally:
            if running.lane is not None:
                self._pool.release(running.lane)
            mode = "stream" if call.stream else "whole"
            self._metrics.call_seconds.labels(mode).observe(time.perf_counter() - running.started)
        if not is_first:
            return await self._first_answer(running)
        return held if call.stream else call.dialect.encode_reply(held, call)

    async def _record_failure(self, running: Running, error: BaseException) -> None:
        """Store and count a failed or aborted call, with what was sampled until then."""
        is_cut_off = bool(running.choices)
        if isinstance(error, PromptTooLong):
            running.num_prompt_tokens = error.num_tokens
        elif isinstance(error, EngineRefused) and not error.is_transient:
            running.num_prompt_tokens = len(running.place.between)  # what was rendered for nothing
        match error:
            case ClientLeft():
                reason, is_cut_off = "client_left", True
            case asyncio.CancelledError():
                reason, is_cut_off = "proxy_stopped", True
            case StoreError():
                self._metrics.turns.labels("error", NOT_STORED).inc()
                return
            case EngineUnavailable() if is_cut_off and not isinstance(error, EngineReplyTooLong):
                reason = "engine_broke_off"
            case TurnwiseError():
                reason = problems.code_of(error)
            case _:  # a reply that cannot be understood
                reason, is_cut_off = "internal_error", False
        if is_cut_off:
            await self._commit(running, capture.build_turns(running, aborted=reason))
            return
        if running.lane is not None:
            running.version_first = running.version_last = running.lane.sampled_version
        await self._append(running, [capture.failed_turn(running, reason)])
        self._metrics.turns.labels("error", reason).inc()

    async def _sample(self, running: Running, send: Send) -> bytes:
        """Return the whole reply in the engine's format, or a stream's finishing events."""
        call, place = running.call, running.place
        await self._sessions.plan(place, call)
        lane = running.lane = await self._pool.admit(place.session, call.policy_version, has_waited=running.has_waited)
        raw: bytes | None = None
        while raw is None:
            running.version_first = running.version_last = lane.sampled_version
            self._faults.point("before_engine")
            try:
                with await self._send(running, lane) as answer:
                    if call.stream:
                        return await self._relay_events(answer, running, lane, send)
                    raw = await answer.read(self._max_reply_bytes)
            except (Disconnected, EngineUnavailable) as error:
                lane = await self._moved(running, lane, error)
        running.version_last = lane.sampled_version
        (shown,) = lane.read_reply([raw], running, call, place)
        if not running.choices:
            raise EngineUnavailable(f"the engine at {lane.engine.url} answered without a choice; retry")
        return shown

    async def _moved(self, running: Running, lost: Lane, error: Disconnected | EngineUnavailable) -> Lane:
        """Return the lane of another engine, which samples a call anew: nothing of its reply was kept or sent.

        Its engine took no connection, or was the first to break it off: a call that ends its engine must not end all.

        Raises:
            EngineUnavailable: there is no other, or the reply has begun, is too long, or did not come in time.
        """
        cause = error if isinstance(error, Disconnected) else error.__cause__
        has_begun = running.has_sent or running.choices
        is_lost = isinstance(cause, NotConnected) and not cause.is_local
        breaks_off = isinstance(cause, Broken) and not running.is_broken_off
        if (is_lost or breaks_off) and not has_begun:
            if breaks_off:
                running.is_broken_off = True
                await asyncio.sleep(LOST_TOGETHER_SECONDS)
            avoided, has_waited = lost.engine if lost.engine.is_serving else None, running.has_waited
            call, session = running.call, running.place.session
            with contextlib.suppress(EngineUnavailable, Conflict):  # its engine may have the only such weights
                lane = await self._pool.admit(session, call.policy_version, has_waited=has_waited, avoided=avoided)
                self._pool.release(lost)
                running.lane, running.is_sent_again, running.has_waited = lane, True, True
                call.encode_with(call.make_encoder)
                self._metrics.retries.labels("engine").inc()
                return lane
        if isinstance(error, EngineUnavailable):
            raise error
        raise _cut_off(lost.engine.url, running.call, error) from error

    async def _send(self, running: Running, lane: Lane) -> Answer:
        """Send a call to its engine; if that refuses it, once more as a new chain or with its adapter loaded again."""
        call, place, headers = running.call, running.place, {"x-request-id": running.attempt.call_id}
        while True:
            if call.media is not None:
                call.media.sent(call, place, lane.engine.url)
            found = {EVERY_CALL, *call.body, *call.notes, *lane.engine.defaults, *lane.engine.gives}
            for marks, step in self._steps.sent:
                if not marks.isdisjoint(found):
                    step(running)
            try:
                return await lane.engine.sample(call, place, lane.model, headers)
            except EngineRefused as refused:
                reason = None if call.media is None or place.parent is None else call.media.why_refused(refused.body)
                if running.is_sent_again or (
                    reason is None and (lane.adapter is None or refused.status != HTTPStatus.NOT_FOUND)
                ):
                    raise
            running.is_sent_again = True
            if reason is not None:
                place.start_chain(reason)
            else:
                await self._pool.load_again(lane)

    async def _relay_events(self, answer: Answer, running: Running, lane: Lane, send: Send) -> bytes:
        """Send the events of a stream up to the finishing ones; return these.

        Raises:
            Disconnected: the stream has no end.
        """
        held, num_bytes, buffer, is_finished = b"", 0, EventBuffer(), False
        choices = running.choices.values()
        while data := await answer.next_part():
            running.version_last = lane.sampled_version
            num_bytes += len(data)
            if num_bytes > self._max_reply_bytes:
                raise AnswerTooLong(self._max_reply_bytes)
            held += take_events(buffer.feed(data), running, lane)
            has_all = len(choices) >= running.call.num_choices
            is_finished = has_all and all(each.finish_reason is not None for each in choices)
            if held and not is_finished:
                running.has_sent, encoded, held = True, held, b""
                await send(encoded)
                self._faults.point("mid_stream")
        if buffer.pending or not is_finished:
            raise Disconnected
        return held

    async def _first_answer(self, running: Running) -> bytes:
        """Return the stored answer of another process's call under the same key, if no other reply was begun."""
        key = running.call.idempotency_key
        if running.has_sent:
            raise Conflict(
                f"another call with the Idempotency-Key {key!r} was stored first; "
                "discard this stream and retry to get the stored reply",
                code="idempotency_key_in_use",
            )
        running.call.encode_with(running.call.make_encoder)
        answer = await self._repeated(running)
        if answer is None:
            raise Conflict(
                f"a reply to the Idempotency-Key {key!r} is stored, but it is not whole; retry with a new key",
                code="idempotency_key_in_use",
            )
        return answer

    async def _repeated(self, running: Running) -> bytes | None:
        stored = await self._attempts.stored_answer(
            running.call, running.attempt, running.place.live.session, self._sessions.template
        )
        if stored is None:
            return None
        answer, running.version_first = stored
        return answer

    async def _commit(self, running: Running, turns: list[NewTurn]) -> bool:
        """Store the call's turns, then add them to the session in memory.

        Returns:
            Whether they are stored; not if another process has stored a reply under the same key.
        """
        place, metrics = running.place, self._metrics
        running.num_prompt_tokens = turns[0].prompt_length
        for marks, step in self._steps.built:
            if not marks.isdisjoint(running.kept):
                step(running, turns)
        self._faults.point("before_commit")
        is_first = await self._append(running, turns)
        self._faults.point("after_commit_before_reply")
        if not is_first:
            metrics.coalesced.inc()
            return False
        for turn in turns:
            metrics.turns.labels(turn.outcome, turn.reason or "").inc()
            metrics.tokens.labels("sampled").inc(len(turn.token_ids))
            if turn.sampling.get("temperature") == 0:
                metrics.greedy_tokens.inc(len(turn.token_ids))
        metrics.tokens.labels("prompt").inc(running.num_prompt_tokens)
        if place.reason is not None:
            metrics.breaks.labels(place.reason).inc()
        if running.first_token_at is not None:
            metrics.ttft_seconds.observe(running.first_token_at - running.started)
        known = self._sessions.remember(place, turns)
        for each in self._steps.stored:
            await each(running, turns, known)
        return True

    async def _append(self, running: Running, turns: list[NewTurn]) -> bool:
        """Store turns, or count the call as not stored; return whether they are what is stored under their key.

        Forget a session that another proxy has ended or deleted: the next call reads it again.

        Raises:
            SessionDeleted: the session was deleted, during the call or by another proxy before it.
        """
        key = running.place.live.key
        try:
            is_first = await self._writer.append(turns)
        except BaseException as error:
            self._metrics.turns.labels("error", NOT_STORED).inc()
            if isinstance(error, NotFound):
                self._sessions.cache.drop(key)
                raise SessionDeleted(
                    f"session {key[1]!r} was deleted, so this reply is not stored; retry to get one in a new session",
                    param="session_id",
                ) from error
            raise
        for turn in turns:
            for name in turn.problems.keys() & self._steps.unpacked.keys():
                self._steps.unpacked[name].labels(turn.problems[name]).inc()
        if any(turn.reason == stored_turns.SESSION_ENDED for turn in turns):
            self._sessions.cache.drop(key)
        return is_first
