"""One call from the canonical request to the reply's last byte: request → plan → relay → commit → reply.

The last byte waits for the commit. A whole reply is sent after the commit. A stream is sent as it arrives; only the
events that tell the client that it is complete, from the finishing chunk on, are held until the turn is stored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

from proxy.auth import Principal
from proxy.calls import capture
from proxy.calls.replays import RequestIdentity, check_same_request, rebuilt_answer
from proxy.calls.running import (
    ClientLeft,
    Running,
    broken_stream,
    cancelled_when_client_leaves,
    stored_reason,
    take_events,
    take_whole,
    too_long,
)
from proxy.continuation.forest import Forest
from proxy.continuation.roles import Correction, corrections, find_role
from proxy.continuation.sessions import Sessions
from proxy.dialects import sse
from proxy.dialects.base import Call
from proxy.engines.answers import Answer, AnswerTooLong, Disconnected
from proxy.engines.engine import Lane
from proxy.engines.pool import EnginePool
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.writer.client import Writer
from proxy.writer.process import Ending, NewTurn
from turnwise.errors import Conflict, EngineRefused, EngineUnavailable, NotFound, ProxyUnavailable, StoreError
from turnwise.store import queries
from turnwise.store.database import Connection, Database
from turnwise.store.new_turns import SESSION_ENDED
from turnwise.store.roles import set_roles
from turnwise.types import Turn

T = TypeVar("T")
Send = Callable[[bytes], Coroutine[Any, Any, None]]
STOPPING = "the proxy is stopping and cut this call off; retry: what was sampled until then is stored"


async def _send_nothing(_: bytes) -> None:
    """Stand for the client of a whole reply, which gets no part of it early."""


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
        *,
        max_reply_bytes: int,
    ) -> None:
        self._faults = faults or FaultPoints()
        self._database = database
        self._pool = pool
        self._sessions = sessions
        self._writer = writer
        self._metrics = metrics
        self._max_reply_bytes = max_reply_bytes
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def begin(self, call: Call, principal: Principal, identity: RequestIdentity, call_id: str) -> Running:
        """Find the call's session and plan its prompt; the turn that it extends is reserved until `end`.

        Until the first engine has served, the chat template is unknown and no call could extend a stored turn.
        """
        must_wait = self._sessions.template is None and not self._pool.serving
        has_waited = must_wait and not await self._pool.wait_for_first()
        conversation = await self._sessions.read_conversation(call, principal)
        placement = await self._sessions.find(call, conversation, principal)
        if sampling := placement.live.session.sampling:  # overrides the call's before it is planned, sent and stored
            call.body = {**call.body, **sampling}
        try:
            plan = await self._sessions.plan(placement, call, conversation)
        except BaseException:
            self._sessions.release(placement)
            raise
        return Running(call, placement, plan, identity, call_id, has_waited=has_waited)

    def end(self, running: Running) -> None:
        """Release the turn that the call has reserved."""
        self._sessions.release(running.placement)

    async def stored_turns(self, running: Running) -> list[Turn]:
        """Return the turns, one per choice, that an earlier call with the same `Idempotency-Key` stored.

        Raises:
            Conflict: the key was used with another request.
        """
        call, session, key = running.call, running.session, running.call.idempotency_key
        if key is None:
            return []

        def read(connection: Connection) -> list[Turn]:
            names = [capture.request_key(key, index) for index in range(call.num_choices)]
            found = [queries.turn_by_request(connection, session.tenant, session.session_id, name) for name in names]
            return [turn for turn in found if turn is not None and turn.finish_reason is not None]

        turns = await self._database.fetch(read)
        for turn in turns:
            check_same_request(running.identity, turn.request_digest)
        return turns if len(turns) == call.num_choices else []

    async def reply(self, running: Running, left: asyncio.Future[None], send: Send = _send_nothing) -> bytes:
        """Return the whole reply, or the finishing events of a stream, once its turns are stored.

        Args:
            running: the call.
            left: done when the client has closed its connection.
            send: gets the earlier events of a stream as they arrive.

        Raises:
            ClientLeft: the client closed its connection; what was sampled until then is stored.
            Conflict: another process has stored its reply under the same `Idempotency-Key` while events were sent.
            EngineError, StoreError, Overloaded, ProxyUnavailable: no reply, a reply that broke off, or one that could
                not be stored; events may have been sent by then.
        """
        call = running.call
        held = await self._recorded(running, self._sample(running, send, left))
        if held is None:
            return await self._stored_reply(running)
        return held if call.stream else call.dialect.encode_reply(held, call)

    async def _sample(self, running: Running, send: Send, left: asyncio.Future[None]) -> bytes | None:
        """Read the reply, then store its turns.

        Returns:
            The whole reply in the engine's format, or a stream's finishing events; None if another process has stored
            a reply under the same key.
        """
        with cancelled_when_client_leaves(left):
            lane = running.lane = await self._pool.admit(
                running.session, running.call.policy_version, has_waited=running.has_waited
            )
            running.version_first = lane.version
            self._faults.point("before_engine")
            headers = {"content-type": "application/json", "x-request-id": running.call_id}
            try:
                sent = await lane.engine.sample(running.call, running.plan, lane.model, headers)
            except EngineRefused as refused:
                if lane.adapter is None or refused.status != HTTPStatus.NOT_FOUND:
                    raise
                await self._pool.load_again(lane)
                sent = await lane.engine.sample(running.call, running.plan, lane.model, headers)
            with sent as answer:
                if running.call.stream:
                    held = await self._relay_events(answer, running, lane, send)
                else:
                    held = await self._read_whole(answer, running, lane)
        return held if await self._commit(running) else None

    async def _read_whole(self, answer: Answer, running: Running, lane: Lane) -> bytes:
        try:
            raw = await answer.read(self._max_reply_bytes)
        except AnswerTooLong as error:
            raise too_long(lane, error) from error
        except Disconnected as error:
            raise EngineUnavailable(
                f"the engine at {lane.engine.url} closed the connection before its reply was complete; retry"
            ) from error
        running.version_last = lane.version
        return take_whole(raw, running, lane)

    async def _relay_events(self, answer: Answer, running: Running, lane: Lane, send: Send) -> bytes:
        """Send the events of a stream up to the finishing ones; return these."""
        held, num_bytes, buffer = b"", 0, sse.EventBuffer()
        try:
            while data := await answer.next_part():
                running.version_last = lane.version
                num_bytes += len(data)
                if num_bytes > self._max_reply_bytes:
                    raise too_long(lane, AnswerTooLong(self._max_reply_bytes))
                held += take_events(buffer.feed(data), running, lane)
                if held and not running.is_finished:
                    running.has_sent, encoded, held = True, held, b""
                    await send(encoded)
                    self._faults.point("mid_stream")
        except Disconnected as error:
            raise broken_stream(lane) from error
        if buffer.pending or not running.is_finished:
            raise broken_stream(lane)
        return held

    async def _stored_reply(self, running: Running) -> bytes:
        """Return the stored reply of another process's call under the same key, if no other reply was begun."""
        if running.has_sent:
            raise Conflict(
                f"another call with the Idempotency-Key {running.call.idempotency_key!r} was stored first; "
                "discard this stream and retry to get the stored reply",
                code="idempotency_key_in_use",
            )
        stored = await self.stored_turns(running)
        running.version_first = stored[0].policy_version_first
        running.call.restart_encoder()
        return await self.rebuild(running, stored)

    async def rebuild(self, running: Running, stored: list[Turn]) -> bytes:
        """Return the answer to a call from its stored turns, with the token ids and logprobs that it asks for."""
        call, template, prompt = running.call, self._sessions.template, None
        if call.wants_token_ids:
            view = await self._database.fetch(queries.turn, running.session.tenant, stored[0].turn_id)
            prompt = view.prompt_token_ids
        ids = {token for turn in stored for token in turn.token_ids.tolist()} if call.wants_logprobs else set()
        texts = template.token_texts(ids) if template is not None else {}
        return rebuilt_answer(call, stored, prompt, texts)

    async def _recorded(self, running: Running, sampling: Coroutine[Any, Any, T]) -> T:
        """Sample a reply and return its result. Record a failed or aborted call exactly once.

        Raises:
            ProxyUnavailable: the server cancelled the call because it stops.
        """
        self._num_running += 1
        self._idle.clear()
        try:
            return await sampling
        except ClientLeft:
            await self._commit(running, aborted="client_left")
            raise
        except asyncio.CancelledError as cancelled:
            # Only the server cancels a call, when it stops and its drain time is over.
            await self._commit(running, aborted="proxy_stopped")
            raise ProxyUnavailable(STOPPING) from cancelled
        except EngineRefused as refused:
            await self._commit_error(running, f"engine_{refused.status}")
            raise
        except EngineUnavailable as error:
            if running.captured.choices:
                await self._commit(running, aborted=stored_reason(error, "engine_broke_off"))
            else:
                await self._commit_error(running, stored_reason(error, "engine_unavailable"))
            raise
        except StoreError:
            self._metrics.turns_of("error", "not_stored").inc()
            raise
        finally:
            if running.lane is not None:
                self._pool.release(running.lane)
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
            mode = "stream" if running.call.stream else "whole"
            self._metrics.call_seconds_of(mode).observe(time.perf_counter() - running.started)

    async def wait_idle(self) -> None:
        """Wait until no call runs."""
        await self._idle.wait()

    async def _commit(self, running: Running, *, aborted: str | None = None) -> bool:
        """Store the call's turns, then add them to the session in memory.

        Returns:
            Whether they are stored; not if another process has stored a reply under the same key.
        """
        forest = running.placement.live.forest
        call, plan = running.call, running.plan
        timing = running.timing()
        root = capture.root_of(call, timing) if plan.parent is None else None
        found = find_role(call, plan, forest, root, is_named=running.placement.inferred_by is None)
        turns = capture.build_turns(
            call,
            plan,
            running.captured,
            timing,
            turn_id=running.turn_id,
            session=running.session,
            request_digest=running.identity.digest,
            inferred_by=running.placement.inferred_by,
            found=found,
            aborted=aborted,
        )
        running.num_prompt_tokens = turns[0].prompt_length
        self._faults.point("before_commit")
        endings = await self._append(running, turns)
        self._faults.point("after_commit_before_reply")
        if endings[0].turn_id != running.turn_id:
            self._metrics.coalesced.inc()
            return False
        known = [
            capture.known_turn(turn, plan, ending.chain_id, root)
            for turn, ending in zip(turns, endings, strict=True)
            if len(turn.token_ids)
        ]
        self._sessions.remember(
            running.placement.live,
            known,
            inferred_for=running.placement.inferred_by,
            continued=running.placement.parent,
        )
        self._count(running, endings)
        self._metrics.turns_by_role_of(found.role.value).inc(len(endings))
        for first in known[:1]:
            for correction in corrections(first, forest):
                await self._correct(correction, forest)
        return True

    async def _append(self, running: Running, turns: list[NewTurn]) -> list[Ending]:
        """Store turns. Forget a session that another proxy has ended or deleted: the next call reads it again."""
        key = running.placement.live.key
        try:
            endings = await self._writer.append(turns)
        except NotFound:
            self._sessions.forget(*key)
            raise
        if any(ending.reason == SESSION_ENDED for ending in endings):
            self._sessions.forget(*key)
        return endings

    async def _correct(self, correction: Correction, forest: Forest) -> None:
        """Store the role that earlier turns have turned out to have."""
        await self._writer.do(set_roles, correction.turn_ids, *correction.found)
        for turn_id in correction.turn_ids:
            forest.by_id[turn_id].role = correction.found.role

    def _count(self, running: Running, endings: list[Ending]) -> None:
        metrics = self._metrics
        for ending in endings:
            metrics.turns_of(ending.outcome, ending.reason or "").inc()
        metrics.tokens_of("sampled").inc(sum(len(each.token_ids) for each in running.captured.choices.values()))
        metrics.tokens_of("prompt").inc(running.num_prompt_tokens)
        if running.plan.reason is not None:
            metrics.breaks_of(running.plan.reason).inc()
        if running.first_token_at is not None:
            metrics.ttft_seconds.observe(running.first_token_at - running.started)

    async def _commit_error(self, running: Running, reason: str) -> None:
        """Store the turn of a call that has no completion."""
        if running.lane is not None:
            running.version_first = running.version_last = running.lane.version
        turn = capture.failed_turn(
            running.call,
            running.timing(),
            reason,
            turn_id=running.turn_id,
            session=running.session,
            inferred_by=running.placement.inferred_by,
        )
        await self._append(running, [turn])
        self._metrics.turns_of("error", reason).inc()
