"""Retried calls: a retry gets the answer of the first call, from one engine call.

A call is a retry of another one if tenant, caller, session and request are equal, and either both carry the same
`Idempotency-Key`, or the call has the OpenAI SDK's `x-stainless-retry-count` above 0 and the answer to the first call
could not be delivered. An answer of the second kind is given to one retry only, because parallel rollouts send equal
requests. An unmarked call is never a retry: agents sample the same prompt twice. Answers are kept in memory up to a
number of bytes; an answer under an `Idempotency-Key` that is no longer in memory is rebuilt from the store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Mapping
from typing import NamedTuple

import orjson
from blake3 import blake3

from proxy.auth import Principal
from proxy.dialects.base import Call
from turnwise.errors import Conflict
from turnwise.json_text import dumps
from turnwise.types import Json, TokenIds, Turn

ATTEMPT_BYTES = 800
"""Memory of one attempt without its answer, roughly."""
DIGEST_BYTES = 16
FORM_FIELDS = frozenset({"stream", "stream_options"})
"""Request fields that decide how an answer is sent, not what is sampled."""


class RequestIdentity(NamedTuple):
    """What a retry and its first call have in common."""

    caller: tuple[str, str, str]
    """Tenant, key, and the session that the request names; empty without one."""
    idempotency_key: str | None
    digest: bytes
    """Digest of the request; under an `Idempotency-Key` without the fields that decide the answer's form."""
    form: tuple[str, bool]
    """Dialect, and whether the answer is streamed."""
    lookup_key: tuple[object, ...]
    """The part of the identity that an attempt is found by."""

    def stored_key(self, index: int) -> str:
        _, key_id, _ = self.caller
        return f"{key_id}\n{self.idempotency_key}#{index}"  # neither id has a line feed


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One call that a retry may refer to."""

    identity: RequestIdentity
    call_id: str
    left: asyncio.Future[None]
    """Done once the client has closed its connection."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the answer's headers say of the call: its session, its version."""
    answer: bytes | None = None
    """The whole reply, or all events of a stream; None until the turn is stored."""
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set once the call has ended, whether or not it has an answer."""


class Replays:
    """Recent calls, keyed by what identifies a retry."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._attempts: dict[Attempt, None] = {}
        """The oldest first."""
        self._by_key: dict[tuple[object, ...], list[Attempt]] = {}

    async def find(self, identity: RequestIdentity, *, is_retry: bool) -> Attempt | None:
        """Return the call that this one retries, with its answer; None for a call that must be sampled.

        Wait for a first call that is still running.

        Raises:
            Conflict: the `Idempotency-Key` was used with another request.
        """
        if identity.idempotency_key is None:
            return await self._claim_undelivered(identity) if is_retry else None
        while attempts := self._by_key.get(identity.lookup_key):
            (attempt,) = attempts
            check_same_request(identity, attempt.identity.digest)
            if attempt.settled.is_set():
                # In another form, the answer is rebuilt from the store.
                return attempt if attempt.answer is not None and attempt.identity.form == identity.form else None
            await attempt.settled.wait()
        return None

    def has_undelivered(self, tenant: str, key_id: str) -> bool:
        """Return whether a client of an API key has left before it got its answer, which a retry may get."""
        return any(
            attempt.left.done() and attempt.identity.caller[:2] == (tenant, key_id) for attempt in self._attempts
        )

    def begin(self, identity: RequestIdentity, left: asyncio.Future[None]) -> Attempt:
        """Add a call that starts to sample, under a new id.

        The id is the milliseconds since 1970, and 80 random bits: a database writes the index of such ids at its end
        only. Random ids change another page of the index for each row.
        """
        call_id = f"{time.time_ns() // 1_000_000:012x}{random.getrandbits(80):020x}"
        attempt = Attempt(identity, call_id, left)
        if identity.idempotency_key is not None:
            for earlier in self._by_key.get(identity.lookup_key, [])[:]:
                self._remove(earlier)
        self._attempts[attempt] = None
        self._by_key.setdefault(identity.lookup_key, []).append(attempt)
        self._num_bytes += ATTEMPT_BYTES
        return attempt

    def settle(self, attempt: Attempt, answer: bytes | None) -> None:
        """Record the end of a call, right after its answer was sent.

        Without an answer, the next retry samples again. An answer without an `Idempotency-Key` is kept only if its
        client was gone before it could be sent.
        """
        attempt.settled.set()
        attempt.settled = self._settled  # one event for all: an event of its own takes more memory than the rest
        is_useful = attempt.identity.idempotency_key is not None or attempt.left.done()
        if answer is None or not is_useful:
            self._remove(attempt)
            return
        if attempt in self._attempts:
            # A copy: the encoder's buffer may be many times as long as its content.
            attempt.answer = memoryview(answer).tobytes()
            self._num_bytes += len(answer)
        while self._num_bytes > self._max_bytes and self._attempts:
            self._remove(next(iter(self._attempts)))

    async def _claim_undelivered(self, identity: RequestIdentity) -> Attempt | None:
        for attempt in self._by_key.get(identity.lookup_key, [])[:]:
            if attempt.left.done():
                await attempt.settled.wait()
                if attempt.answer is not None and attempt in self._attempts:
                    self._remove(attempt)
                    return attempt
        return None

    def _remove(self, attempt: Attempt) -> None:
        if attempt not in self._attempts:
            return
        del self._attempts[attempt]
        same = self._by_key[attempt.identity.lookup_key]
        same.remove(attempt)
        if not same:
            del self._by_key[attempt.identity.lookup_key]
        self._num_bytes -= ATTEMPT_BYTES + len(attempt.answer or b"")


def check_same_request(identity: RequestIdentity, first_digest: bytes | None) -> None:
    """Check that an `Idempotency-Key` comes with the request that it was first used with.

    Raises:
        Conflict: it comes with another request.
    """
    if first_digest is not None and first_digest != identity.digest:
        raise Conflict(
            f"the Idempotency-Key {identity.idempotency_key!r} was used with another request; use a new key",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )


def identify_request(call: Call, principal: Principal, digest: bytes) -> RequestIdentity:
    """Return what a retry of the call must have in common with it, its request's digest among it."""
    caller = principal.tenant, principal.key_id, call.session_id or ""
    key, form = call.idempotency_key, (call.dialect.name, call.stream)
    return RequestIdentity(caller, key, digest, form, (*caller, digest, form) if key is None else (*caller, key))


def keyed_digest(call: Call) -> bytes:
    """Return the digest of a request under an `Idempotency-Key`: without the fields that decide the answer's form.

    It does not depend on the turns that the call continues without repeating them: a later attempt may find more.
    """
    fields = {field: value for field, value in call.body.items() if field not in FORM_FIELDS}
    named = [call.dialect.name, call.num_choices, call.previous_turn_id, fields]
    request = dumps(named, option=orjson.OPT_SORT_KEYS)
    return blake3(request).digest(DIGEST_BYTES)


def rebuilt_answer(call: Call, turns: list[Turn], prompt: TokenIds | None, texts: Mapping[int, str]) -> bytes:
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
