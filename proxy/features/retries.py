"""Which calls are retries of an earlier one and get its answer, so that the engine works once.

A call is a retry of another one if tenant, caller, session and request are equal, and either both carry the same
`Idempotency-Key`, or the call has the OpenAI SDK's `x-stainless-retry-count` above 0 and the answer to the first call
could not be delivered. An answer of the second kind is given to one retry only, because parallel rollouts send equal
requests. An unmarked call is never a retry: agents sample the same prompt twice. Answers are kept in memory up to a
number of bytes; an answer under an `Idempotency-Key` that is no longer in memory is rebuilt from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import cachetools
import orjson

from proxy.auth import Principal
from proxy.calls.capture import NOT_YET, Attempt, Attempts, Running
from proxy.calls.steps import CallStep
from proxy.dialects.base import Call
from proxy.sessions.template import ChatTemplate
from turnwise.errors import Conflict
from turnwise.store import selection
from turnwise.store import turns as stored_turns
from turnwise.store.database import Connection, Database
from turnwise.types import Json, Session, TokenIds, Turn

if TYPE_CHECKING:
    from proxy.services import Services

ATTEMPT_BYTES = 800


def _num_bytes(attempts: tuple[Attempt, ...]) -> int:
    return sum(ATTEMPT_BYTES + len(attempt.answer or b"") for attempt in attempts)


class Retries(Attempts):
    """Calls that run, and the answers to recent ones, by what identifies a retry."""

    def __init__(self, database: Database, max_bytes: int) -> None:
        super().__init__(database, max_bytes)
        self._settled = asyncio.Event()
        self._settled.set()
        self._running: dict[tuple[object, ...], list[Attempt]] = {}
        self._answered: cachetools.FIFOCache[tuple[object, ...], tuple[Attempt, ...]]
        self._answered = cachetools.FIFOCache(max_bytes, _num_bytes)

    def has_undelivered(self, principal: Principal) -> bool:
        """Return whether a client of the caller's key has left before it got its answer, which a retry may get."""
        caller = principal.tenant, principal.key_id
        known = (attempts for kept in (self._running, self._answered) for attempts in kept.values())
        return any(each.left.done() and each.caller[:2] == caller for attempts in known for each in attempts)

    async def begin(self, call: Call, principal: Principal, digest: bytes, left: asyncio.Future[None]) -> Attempt:
        """Return the call that this one retries, with its answer; else this one, which starts to sample.

        Wait for a first call that is still running. A call takes the place of an earlier one under its
        `Idempotency-Key`.
        """
        attempt = await super().begin(call, principal, digest, left)
        key, found_by = attempt.idempotency_key, attempt.found_by
        if (key is not None or call.is_retry) and (earlier := await self._find(attempt)) is not None:
            return earlier
        if key is None:
            self._running.setdefault(found_by, []).append(attempt)
        else:
            self._running[found_by] = [attempt]
            self._answered.pop(found_by, None)
        return attempt

    async def _find(self, attempt: Attempt) -> Attempt | None:
        """Return the first call of a retry, with its answer; not that of a turn that was deleted since."""
        is_keyed = attempt.idempotency_key is not None
        earlier = await (self._keyed(attempt) if is_keyed else self._claim_undelivered(attempt))
        if earlier is None:
            return None
        stored = await self._database.fetch(selection.sessions_of_turns, attempt.caller[0], [earlier.turn_id])
        return earlier if earlier.turn_id in stored else None

    def settle(self, attempt: Attempt, answer: bytes | None) -> None:
        """Record the end of a call, right after its answer was sent.

        Without an answer, the next retry samples again. An answer without an `Idempotency-Key` is kept only if its
        client was gone before it could be sent.
        """
        attempt.settled.set()
        attempt.settled = self._settled  # one event for all: an event of its own takes more memory than the rest
        running = self._running.get(attempt.found_by, [])
        if attempt not in running:
            return
        running.remove(attempt)
        if not running:
            del self._running[attempt.found_by]
        if answer is not None and (attempt.idempotency_key is not None or attempt.left.done()):
            # A copy: the encoder's buffer may be many times as long as its content.
            attempt.answer = memoryview(answer).tobytes()
            with contextlib.suppress(ValueError):  # it is longer than the whole cache
                self._answered[attempt.found_by] = (*self._answered.get(attempt.found_by, ()), attempt)

    async def stored_answer(
        self, call: Call, attempt: Attempt, session: Session, template: ChatTemplate | None
    ) -> tuple[bytes, int] | None:
        """Return the answer to an earlier call under the same `Idempotency-Key`, from its turns, and its version.

        It has one turn for each choice, and the token ids and logprobs that this call asks for. None if no whole reply
        is stored.

        Raises:
            Conflict: the key was used with another request.
        """

        def read(connection: Connection) -> list[Turn]:
            names = [attempt.stored_key(index) for index in range(call.num_choices)]
            own = session.tenant, session.session_id
            found = [stored_turns.find_turn(connection, *own, request_key=name) for name in names]
            return [turn for turn in found if turn is not None and turn.finish_reason is not None]

        stored, prompt = await self._database.fetch(read), None
        for turn in stored:
            _check_same_request(attempt, turn.request_digest)
        if len(stored) != call.num_choices:
            return None
        if call.wants_token_ids:
            prompt = (
                await self._database.fetch(stored_turns.read_turn, session.tenant, stored[0].turn_id)
            ).prompt_token_ids
        ids = {token for turn in stored for token in turn.token_ids.tolist()} if call.wants_logprobs else set()
        texts = template.token_texts(ids) if template is not None else {}
        return _rebuilt_answer(call, stored, prompt, texts), stored[0].policy_version_first

    async def _keyed(self, attempt: Attempt) -> Attempt | None:
        while running := self._running.get(attempt.found_by):
            _check_same_request(attempt, running[0].digest)
            await running[0].settled.wait()
        for earlier in self._answered.get(attempt.found_by, ()):
            _check_same_request(attempt, earlier.digest)
            if earlier.form == attempt.form:  # in another form, the answer is rebuilt from the store
                return earlier
        return None

    async def _claim_undelivered(self, attempt: Attempt) -> Attempt | None:
        found_by = attempt.found_by
        for running in self._running.get(found_by, [])[:]:
            if running.left.done() and found_by not in self._answered:
                await running.settled.wait()
        answered = self._answered.pop(found_by, ())
        if answered[1:]:
            self._answered[found_by] = answered[1:]
        return answered[0] if answered else None


class Settling(CallStep):
    """Lets retries of a call go on once it has ended."""

    takes_all = True

    def __init__(self, services: Services) -> None:
        self._services = services

    def ended(self, running: Running) -> None:
        if running.attempt is not NOT_YET:
            retries = self._services.attempts
            assert isinstance(retries, Retries), "this step and what it tells are on together"
            retries.settle(running.attempt, running.answer)


def _check_same_request(attempt: Attempt, first_digest: bytes | None) -> None:
    if first_digest is not None and first_digest != attempt.digest:
        raise Conflict(
            f"the Idempotency-Key {attempt.idempotency_key!r} was used with another request; use a new key",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )


def _rebuilt_answer(call: Call, turns: list[Turn], prompt: TokenIds | None, texts: Mapping[int, str]) -> bytes:
    """Return the answer to a call from its stored turns, one per choice; a stream has one chunk per choice.

    Args:
        call: The call.
        turns: Its stored turns.
        prompt: The whole prompt of a call that asks for token ids.
        texts: The text of each sampled token, for a call that asks for logprobs.
    """
    first = turns[0]
    head: Json = {"id": first.turn_id, "created": int(first.created_at.timestamp()), "model": first.model}
    sampled = sum(len(turn.token_ids) for turn in turns)
    usage = {
        "prompt_tokens": first.prompt_length,
        "completion_tokens": sampled,
        "total_tokens": first.prompt_length + sampled,
    }
    whole_object, chunk_object = call.dialect.object_names
    choices = [call.dialect.rebuild_choice(call, turn, index, texts) for index, turn in enumerate(turns)]
    shown = {}
    if prompt is not None and "prompt_token_ids" not in choices[0]:
        shown = {"prompt_token_ids": prompt.tolist()}
    head["object"] = chunk_object if call.stream else whole_object
    if not call.stream:
        return call.dialect.encode_reply(orjson.dumps({**head, **shown, "choices": choices, "usage": usage}), call)
    options = call.body.get("stream_options") or {}
    counted = {"usage": usage} if options.get("continuous_usage_stats") else {}
    chunks = [{**head, **counted, "choices": [choice]} for choice in choices]
    chunks[0] |= shown
    if options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    return call.encoder.chunks(list(map(orjson.dumps, chunks))) + call.encoder.done()
