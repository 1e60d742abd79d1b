"""A retried call is one turn: who asks again for the same thing gets the same answer, from one engine call.

Two marks make a call a repetition: the same `Idempotency-Key`, or the same body with the OpenAI SDK's
`x-stainless-retry-count` above 0. An unmarked identical body is a new turn: agents do sample the same prompt twice.
Answers are kept in memory up to a number of bytes; an answer under an `Idempotency-Key` that is no longer there is
rebuilt from the store.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from hashlib import blake2b

import orjson

from proxy.auth import Principal
from proxy.dialects.base import Call
from turnwise.types import Json, Turn

Key = tuple[str, ...]
ATTEMPT_BYTES = 800
"""What remembering a call takes besides its answer."""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One call that may be asked for again."""

    key: Key
    call_id: str
    answer: bytes | None = None
    """The whole reply, or all events of a stream; None until the turn is stored."""
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set once the call has ended, well or not."""


class Replays:
    """The calls of late, by what makes a repetition of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._attempts: collections.OrderedDict[Key, Attempt] = collections.OrderedDict()

    def find(self, call: Call, key: Key) -> Attempt | None:
        """Return the call that this one repeats, if it is marked as a repetition."""
        if call.idempotency_key is None and not call.is_retry:
            return None
        return self._attempts.get(key)

    def begin(self, key: Key, call_id: str) -> Attempt:
        """Remember a call that starts to sample."""
        attempt = Attempt(key, call_id)
        self._drop(self._attempts.pop(key, None))
        self._attempts[key] = attempt
        self._num_bytes += ATTEMPT_BYTES
        return attempt

    def settle(self, attempt: Attempt, answer: bytes | None) -> None:
        """Keep the answer of a call that has ended; without one, the next repetition samples again."""
        attempt.settled.set()
        attempt.settled = self._settled  # an event of its own would be the most of what is remembered
        if answer is not None:
            # A copy: the encoder's buffer may be many times as long as what it says.
            attempt.answer = memoryview(answer).tobytes()
            if self._attempts.get(attempt.key) is attempt:
                self._num_bytes += len(answer)
        while self._num_bytes > self._max_bytes and self._attempts:
            self._drop(self._attempts.popitem(last=False)[1])

    def _drop(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            self._num_bytes -= ATTEMPT_BYTES + len(attempt.answer or b"")


def replay_key(call: Call, principal: Principal, raw: bytes) -> Key:
    """Return what a repetition of the call must have in common with it."""
    if call.idempotency_key is not None:
        return (principal.key_id, call.session_id or "", "key", call.idempotency_key)
    return (principal.key_id, call.session_id or "", "body", blake2b(raw, digest_size=16).hexdigest())


def rebuilt_answer(call: Call, turns: list[Turn]) -> bytes:
    """Return the answer to a call from its stored turns, one per choice; a stream comes as one chunk per choice."""
    first = turns[0]
    head: Json = {"id": first.turn_id, "created": int(first.created_at.timestamp()), "model": first.model}
    sampled = sum(len(turn.token_ids) for turn in turns)
    usage = {
        "prompt_tokens": first.prompt_length,
        "completion_tokens": sampled,
        "total_tokens": first.prompt_length + sampled,
    }
    whole_object, chunk_object = call.dialect.object_names
    choices = [
        call.dialect.rebuild_choice(turn.response, turn.finish_reason, index, stream=call.stream)
        for index, turn in enumerate(turns)
    ]
    head["object"] = chunk_object if call.stream else whole_object
    if not call.stream:
        return call.dialect.encode_reply(orjson.dumps({**head, "choices": choices, "usage": usage}), call)
    options = call.body.get("stream_options") or {}
    counted = {"usage": usage} if options.get("continuous_usage_stats") else {}
    chunks = [{**head, **counted, "choices": [choice]} for choice in choices]
    if options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    return call.encoder.chunks(list(map(orjson.dumps, chunks))) + call.encoder.done()
