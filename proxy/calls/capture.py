"""One call while it runs: its attempt, its state, the reply as it is captured, and the turns that it becomes.

A whole reply is one part, and a stream many. Parts that arrived together are handled together, and no part waits for a
later one. Each turn has one outcome.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import random
import re
import time
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from blake3 import blake3

from proxy.auth import Principal
from proxy.calls.steps import EVERY_CALL
from proxy.dialects.base import DONE, SAMPLED_ENDS, SENT, Call, Captured, Choice
from proxy.engines.engine import Lane
from proxy.http.asgi import BodyMemory
from proxy.sessions.forest import count_ids
from proxy.sessions.place import CallPlace
from proxy.sessions.template import ChatTemplate
from proxy.writer.process import NewTurn
from turnwise.errors import EngineUnavailable
from turnwise.json_text import dumps
from turnwise.store.database import Database
from turnwise.types import Outcome, Session, SessionKey, utc_now

DIGEST_BYTES = 16
FORM_FIELDS = frozenset({"stream", "stream_options"})
"""Request fields that decide how an answer is sent, not what is sampled."""
CUT_OFF_ENDS = frozenset({"abort", "error", "repetition"})
NO_LOGPROBS = np.empty(0, np.float32)
MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_calls", "refusal", "function_call", "annotations", "audio")
"""Fields of a reply that are stored."""
CHOICES = b'"choices"'
"""Present in every chunk of a completion; an event without it is an error."""
NOT_YET: Any = None
"""What a call gets later: it has all of it once it is sampled."""
DATA = re.compile(rb"^data: ?(.+)$", re.MULTILINE)
EVENT = re.compile(rb"^data: ?(.+(?:\n.+)*)", re.MULTILINE)
"""The first data of an event, and the event's lines after it."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclasses.dataclass(slots=True, eq=False)
class Attempt:
    """One call that a retry may refer to."""

    caller: tuple[str, str, str]
    """Tenant, key, and the session that the request names; empty without one."""
    idempotency_key: str | None
    digest: bytes
    """Digest of the request; under an `Idempotency-Key` without the fields that decide the answer's form."""
    form: tuple[str, bool]
    """Dialect, and whether the answer is streamed."""
    found_by: tuple[object, ...]
    """The part of the request that retries have in common with it."""
    call_id: str
    turn_id: str
    """The completion's id, as the engine derives it from the call's id."""
    left: asyncio.Future[None]
    """Done once the client has closed its connection."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the answer's headers say of the call: its session, its version."""
    answer: bytes | None = None
    """The whole reply, or all events of a stream; None until it was sent, and for an answer that is not kept."""
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set once the call has ended, whether or not it has an answer."""

    def stored_key(self, index: int) -> str:
        """Return the name under which a choice is stored, of a call under an `Idempotency-Key`."""
        _, key_id, _ = self.caller
        return f"{key_id}\n{self.idempotency_key}#{index}"  # neither id has a line feed


def request_digest(call: Call, raw: bytes) -> bytes:
    """Return the digest of a request; under an `Idempotency-Key` without the fields that decide the answer's form.

    It does not depend on the turns that the call continues without repeating them: a later attempt may find more.
    """
    if call.idempotency_key is not None:
        fields = {field: value for field, value in call.body.items() if field not in FORM_FIELDS}
        named = [call.dialect.name, call.num_choices, call.previous_turn_id, fields]
        raw = dumps(named, option=orjson.OPT_SORT_KEYS)
    return blake3(raw).digest(DIGEST_BYTES)


class Attempts:
    """The attempts of all calls; what sees that one repeats another extends it."""

    def __init__(self, database: Database, max_bytes: int) -> None:
        self._database = database
        self._max_bytes = max_bytes
        """Memory of the answers that may be kept."""

    def has_undelivered(self, principal: Principal) -> bool:  # noqa: ARG002
        """Return whether a client of the caller's key has left before it got its answer, which a retry may get."""
        return False

    async def begin(self, call: Call, principal: Principal, digest: bytes, left: asyncio.Future[None]) -> Attempt:
        """Return the attempt of a call, under a new id, or the earlier one whose answer it gets.

        The id is the milliseconds since 1970, and 80 random bits: a database writes the index of such ids at its end
        only. Random ids change another page of the index for each row.

        Args:
            call: the call.
            principal: its caller.
            digest: the digest of its request.
            left: done once its client has closed its connection.

        Raises:
            Conflict: the `Idempotency-Key` was used with another request.
        """
        caller, form = (principal.tenant, principal.key_id, call.session_id or ""), (call.dialect.name, call.stream)
        key, call_id = call.idempotency_key, f"{time.time_ns() // 1_000_000:012x}{random.getrandbits(80):020x}"
        found_by = (*caller, digest, form) if key is None else (*caller, key)
        return Attempt(caller, key, digest, form, found_by, call_id, f"{call.dialect.id_prefix}{call_id}", left)

    async def stored_answer(
        self,
        call: Call,  # noqa: ARG002
        attempt: Attempt,  # noqa: ARG002
        session: Session,  # noqa: ARG002
        template: ChatTemplate | None,  # noqa: ARG002
    ) -> tuple[bytes, int] | None:
        """Return the stored answer to an earlier call under the same `Idempotency-Key`, and its version."""
        return None


@dataclasses.dataclass(slots=True)
class Running(Captured):
    """A call from its admission to its last byte: its place, and what the engine has answered so far."""

    call: Call = NOT_YET
    place: CallPlace = NOT_YET
    """Its session, and the turn that it extends; what is found before it is sampled."""
    attempt: Attempt = NOT_YET
    """What a retry of the call refers to; not of a call that is itself answered as a retry."""
    session_key: SessionKey = NOT_YET
    """Tenant and id of its session; also of the call whose answer it repeats, which has no place."""
    has_waited: bool = False
    """Whether the call has waited in vain for the proxy's first engine."""
    lane: Lane | None = None
    """The engine and weights that serve the call; None until the call is admitted."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    principal: Principal = NOT_YET
    """The caller, whose key the call is charged to."""
    left: asyncio.Future[None] = NOT_YET
    """Done when the client has closed its connection."""
    request_headers: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    reply_headers: dict[str, str] = dataclasses.field(default_factory=dict)
    is_admitted: bool = False
    """Whether it counts as a call that runs."""
    body: BodyMemory | None = None
    """The memory of the request's body; None for a short one."""
    is_sent_again: bool = False
    """Whether an engine has refused or lost it, so that one gets it a second time."""
    is_broken_off: bool = False
    """Whether an engine has broken it off; a second one that does is the last."""
    answer: bytes | None = None
    """What was sent to the client; None for a call that failed."""
    num_tokens: int = 0
    """Prompt and sampled tokens, known when the call has ended; or tokens that were counted or copied."""
    num_prompt_tokens: int = 0
    """Prompt tokens that the engine has echoed; counted when the turns are built, because a long prompt takes time."""
    first_token_at: float | None = None
    has_sent: bool = False
    """Whether events of a stream were sent to the client."""
    version_first: int = 0
    version_last: int = 0
    kept: dict[Any, Any] = dataclasses.field(default_factory=functools.partial(dict.fromkeys, (EVERY_CALL,)))
    """What each step keeps of the call, under the step's class."""


@dataclasses.dataclass(slots=True)
class EventBuffer:
    """Splits a stream of server-sent events, which the network may split anywhere, after its last complete event."""

    pending: list[bytes] = dataclasses.field(default_factory=list)
    _has_begun: bool = False
    _ends_in_return: bool = False
    """Whether a line feed at the start of the next bytes is of the same line end."""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the data of the events that are now complete, without their other fields.

        Bytes that end no line are only kept: the event of a long prompt arrives in many parts.
        """
        if b"\r" in data or self._ends_in_return:
            data, ends_in_return = data.removeprefix(b"\n") if self._ends_in_return else data, data.endswith(b"\r")
            self._ends_in_return = ends_in_return
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self.pending += [data] if data else []
            return []
        received = b"".join([*self.pending, data]) if self.pending else data
        if not self._has_begun:
            received, self._has_begun = received.removeprefix(BYTE_ORDER_MARK), True
        events, _, rest = received.rpartition(b"\n\n")
        rest = rest.lstrip(b"\n")
        if rest.endswith(b"\n") and (rest.startswith(b":") or DATA.findall(rest) == [DONE]):
            events, rest = events + b"\n\n" + rest, b""  # some servers leave out the empty line at the end
        self.pending = [rest] if rest else []
        found: list[bytes] = EVENT.findall(events)
        if b"\n" in b"".join(found):
            # The data of an event is JSON, in which a line end can only stand between values.
            found = [b" ".join(DATA.findall(b"data:" + each)) for each in found]
        return found


def take_events(events: list[bytes], running: Running, lane: Lane) -> bytes:
    """Capture the events of a stream that arrived together; return the events for the client.

    An engine reports an error in an event without choices.

    Raises:
        EngineUnavailable: one is not a chunk of a completion.
    """
    encoder, is_over = running.call.encoder, events[-1:] == [DONE]
    chunks = events[:-1] if is_over else events
    try:
        encoded = encoder.chunks(lane.read_reply(chunks, running, running.call, running.place)) if chunks else b""
    except EngineUnavailable:
        if all(CHOICES in chunk for chunk in chunks):
            raise
        encoded = b"".join(
            encoder.chunks(lane.read_reply([chunk], running, running.call, running.place))
            if CHOICES in chunk
            else encoder.error(chunk)
            for chunk in chunks
        )
    if running.first_token_at is None and any(choice.token_ids for choice in running.choices.values()):
        running.first_token_at = time.perf_counter()
        running.version_first = lane.sampled_version
    return encoded + encoder.done() if is_over else encoded


def failed_turn(running: Running, reason: str) -> NewTurn:
    """Return the turn of a call without a completion: it stores the request and no tokens."""
    call = running.call
    turn = NewTurn(
        **_common(running),
        turn_id=running.attempt.turn_id,
        chain_id=running.attempt.turn_id,
        model=call.model,
        messages=call.messages,
        tools=call.tools,
        outcome=Outcome.ERROR,
        reason=reason,
    )
    if call.media is not None:
        call.media.keep_with(turn)
    return turn


def build_turns(running: Running, *, aborted: str | None = None) -> list[NewTurn]:
    """Return one turn per choice; the ids of later choices end in `#1`, `#2`.

    Args:
        running: the call.
        aborted: what cut the reply off; None for a complete reply.
    """
    call, place, own_id = running.call, running.place, running.attempt.turn_id
    parent, common = place.parent, _common(running)
    unplaced = None if call.media is None else call.media.find(call, place, running)
    sent = place.prompt  # in which images have their places now
    turns: list[NewTurn] = []
    for index in sorted(running.choices) or [0]:
        choice = running.choices.get(index) or Choice()
        message = choice.message()
        full, messages, dialogue = place.conversation.extended(message)
        turn_id = own_id if index == 0 else f"{own_id}#{index}"
        echo, prompt = choice.prompt_ids or running.prompt_ids, dict[str, Any]()
        if parent is not None and sent is not None and (echo == SENT or echo == sent.json()[1:-1]):
            # A turn stores what it adds to its parent's messages and ids.
            prompt |= {"parent_turn_id": parent.turn_id, "messages": call.messages[parent.num_messages :]}
            prompt |= {"prompt_delta": place.between, "prompt_length": sent.num_ids}
        else:
            prompt |= {"messages": call.messages, "tools": call.tools}
            prompt |= {"encoded_prompt": echo, "prompt_length": count_ids(echo)}
        turn = NewTurn(
            **common,
            **prompt,
            turn_id=turn_id,
            chain_id=turn_id,  # the store sets the chain of a turn that extends another
            model=call.model or next(iter(running.models), ""),
            response={field: value for field in MESSAGE_FIELDS if (value := message.get(field)) is not None},
            token_ids=np.frombuffer(array("i", choice.token_ids), np.int32),
            finish_reason=choice.finish_reason,
            history_digest=full,
            messages_digest=messages,
            dialogue_digest=dialogue,
            encoded_logprobs=choice.logprobs,
            given=choice.given,
        )
        if call.media is not None:
            call.media.keep_with(turn, is_first=not turns)
        turn.outcome, turn.reason = _outcome(running, turn, aborted, unplaced, is_planned=index < call.num_choices)
        if call.idempotency_key is not None and aborted is None and choice.finish_reason in SAMPLED_ENDS:
            # Not of a reply that was cut off: a retry of it samples again.
            turn.request_key, turn.request_digest = running.attempt.stored_key(index), running.attempt.digest
        turns.append(turn)
    return turns


def _common(running: Running) -> dict[str, Any]:
    """Return the fields that all turns of a call have in common: of the request, the session, and times so far."""
    call, lane, first = running.call, running.lane, running.first_token_at
    session = running.place.session
    return {
        "session_id": session.session_id,
        "tenant": session.tenant,
        "session_created_at": session.created_at,
        "policy_id": session.policy_id,
        "step": call.step,
        "dialect": call.dialect.name,
        "sampling": call.sampling if lane is None else lane.engine.effective_sampling(call),
        "logprobs": NO_LOGPROBS,
        "policy_version_first": running.version_first,
        "policy_version_last": running.version_last,
        "inferred_by": running.place.inferred_by,
        "created_at": running.created_at,
        "ttft_seconds": None if first is None else first - running.started,
        "duration_seconds": time.perf_counter() - running.started,
    }


def _outcome(
    running: Running, turn: NewTurn, aborted: str | None, unplaced: str | None, *, is_planned: bool
) -> tuple[Outcome, str | None]:
    """Return the outcome of a turn, its logprobs not considered, and the reason: the first problem found.

    `unplaced` says why content that is not text keeps it from being trained.
    """
    if aborted is not None:
        return Outcome.ABORTED, aborted
    call, place, end = running.call, running.place, turn.finish_reason
    asked = "" if running.lane is None else running.lane.model
    for reason, applies in (
        ("no_prompt_ids", not turn.prompt_length),
        ("no_token_ids", not len(turn.token_ids)),
        ("unplanned_choice", not is_planned),
        ("another_model", asked and not running.models <= {asked}),
        ("beam_search", call.body.get("use_beam_search")),
        (unplaced, unplaced is not None),
        (f"engine_{end}" if end in CUT_OFF_ENDS else "engine_cut_off", end not in SAMPLED_ENDS),
    ):
        if applies:
            return Outcome.UNTRAINABLE, reason
    if place.prompt is not None and turn.parent_turn_id is None:
        return Outcome.RETOKENISED, "echo_differs"
    # The conversation contains replies, and no stored tokens are used for them.
    is_retokenised = place.parent is None and place.reason is not None and place.conversation.num_replied > 0
    return (Outcome.RETOKENISED if is_retokenised else Outcome.EXACT), place.reason
