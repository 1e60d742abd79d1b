"""One call while it runs: its state, the engine's reply as it is captured, and the turns that it becomes.

A whole reply is one part, and a stream many. Parts that arrived together are handled together, and no part waits for a
later one. Each turn has one outcome.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from array import array
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from proxy.calls.replays import Attempt
from proxy.dialects import sse
from proxy.dialects.base import SENT, Call, Captured, Choice
from proxy.engines.engine import Lane
from proxy.sessions.digests import has_media
from proxy.sessions.encoded_ids import EncodedIds, count_ids, encoded, ids_as_text
from proxy.sessions.forest import NO_ROOT, KnownTurn, Root
from proxy.sessions.plan import NO_IDS, Plan
from proxy.sessions.roles import find_role, read_root
from proxy.sessions.sessions import Placement
from proxy.writer.process import NewTurn
from turnwise.errors import EngineUnavailable
from turnwise.types import Outcome, Role, Session, TokenIds, utc_now

SAMPLED_ENDS = frozenset({"stop", "length", "tool_calls", "function_call"})
"""Finish reasons that a sampler ends with; a reply with any other was cut off by the engine."""
CUT_OFF_ENDS = frozenset({"abort", "error", "repetition"})
"""Other finish reasons of engines."""
NO_LOGPROBS = np.empty(0, np.float32)
UNPLANNED = Plan()
MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_calls", "refusal", "function_call", "annotations", "audio")
"""Fields of a reply that are stored."""
CHOICES = b'"choices"'
"""Present in every chunk of a completion; an event without it is an error."""
NOT_A_COMPLETION = (msgspec.DecodeError, LookupError, TypeError, AttributeError)
"""What decoding a reply raises that is not a completion."""


@dataclasses.dataclass(slots=True)
class Running:
    """A call with its session, its prompt and what the engine has answered so far."""

    call: Call
    placement: Placement
    attempt: Attempt
    """What a retry of the call refers to."""
    has_waited: bool = False
    """Whether the call has waited in vain for the proxy's first engine."""
    plan: Plan = UNPLANNED
    session: Session = dataclasses.field(init=False)
    turn_id: str = dataclasses.field(init=False)
    """The completion's id, as the engine derives it from the request id."""
    lane: Lane | None = None
    """The engine and weights that serve the call; None until the call is admitted."""
    captured: Captured = dataclasses.field(default_factory=Captured)
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    num_prompt_tokens: int = 0
    """Prompt tokens that the engine has echoed; counted when the turns are built, because a long prompt takes time."""
    first_token_at: float | None = None
    has_sent: bool = False
    """Whether events of a stream were sent to the client."""
    version_first: int = 0
    version_last: int = 0
    root: Root | None = None
    """What a call without a parent shows about its chain; None until its turns are built."""

    def __post_init__(self) -> None:
        self.session = self.placement.live.session
        self.turn_id = f"{self.call.dialect.id_prefix}{self.attempt.call_id}"

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason."""
        choices = self.captured.choices.values()
        return len(choices) >= self.call.num_choices and all(each.finish_reason is not None for each in choices)

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens so far."""
        return self.num_prompt_tokens + sum(len(choice.token_ids) for choice in self.captured.choices.values())


def take_events(events: list[bytes], running: Running, lane: Lane) -> bytes:
    """Capture the events of a stream that arrived together; return the events for the client.

    An engine reports an error in an event without choices.

    Raises:
        EngineUnavailable: one is not a chunk of a completion.
    """
    encoder = running.call.encoder
    is_over = events[-1:] == [sse.DONE]
    chunks = events[:-1] if is_over else events
    try:
        encoded = encoder.chunks(take_parts(chunks, running, lane)) if chunks else b""
    except EngineUnavailable:
        if all(CHOICES in chunk for chunk in chunks):
            raise
        encoded = b"".join(
            encoder.chunks(take_parts([chunk], running, lane)) if CHOICES in chunk else encoder.error(chunk)
            for chunk in chunks
        )
    if running.first_token_at is None and any(choice.token_ids for choice in running.captured.choices.values()):
        running.first_token_at = time.perf_counter()
        running.version_first = lane.sampled_version
    return encoded + encoder.done() if is_over else encoded


def take_parts(parts: list[bytes], running: Running, lane: Lane) -> list[bytes]:
    """Capture a whole reply, or chunks of a stream; return them without the fields that the client did not ask for.

    Raises:
        EngineUnavailable: one is not of a completion.
    """
    call = running.call
    inside, requested = lane.model, call.model or lane.engine.model
    try:
        shown = lane.engine.read_reply(parts, running.captured, call, running.plan)
    except NOT_A_COMPLETION as error:
        raise EngineUnavailable(
            f"the engine at {lane.engine.url} answered something that is no completion ({error}); retry"
        ) from error
    if inside != requested:
        old, new = (b'"model":' + orjson.dumps(name) for name in (inside, requested))
        shown = [part.replace(old, new, 1) for part in shown]
    return shown


def failed_turn(running: Running, reason: str) -> NewTurn:
    """Return the turn of a call without a completion: it stores the request and no tokens."""
    call = running.call
    return NewTurn(
        **_common(running),
        turn_id=running.turn_id,
        chain_id=running.turn_id,
        model=call.model,
        messages=call.messages,
        tools=call.tools,
        outcome=Outcome.ERROR,
        reason=reason,
    )


def build_turns(running: Running, *, aborted: str | None = None) -> list[NewTurn]:
    """Return one turn per choice, with the call's role; the ids of later choices end in `#1`, `#2`.

    Args:
        running: the call.
        aborted: what cut the reply off; None for a complete reply.
    """
    call, plan, captured, placement = running.call, running.plan, running.captured, running.placement
    history = placement.conversation.history
    common = _common(running)
    if plan.parent is None:
        running.root = read_root(call.messages, call.tools, common["sampling"])
    found = find_role(call, plan, placement.live.forest, running.root, is_named=placement.inferred_by is None)
    echo = _echoed_prompt(captured.prompt_ids, plan)
    unsampled = _unsampled_reason(running)
    turns = []
    for index in sorted(captured.choices) or [0]:
        choice = captured.choices.get(index) or Choice()
        prompt = _echoed_prompt(choice.prompt_ids, plan) if choice.prompt_ids else echo
        parent = prompt.parent
        unplanned = None if index < call.num_choices else "unplanned_choice"
        outcome, reason = _outcome(prompt, choice, plan, unplanned or unsampled, aborted=aborted)
        message = choice.message()
        digests = history.extended(message)
        own_id = running.turn_id if index == 0 else f"{running.turn_id}#{index}"
        is_whole = aborted is None and choice.finish_reason is not None
        key = call.idempotency_key if is_whole else None  # a retry of a reply that was cut off samples again
        turn = NewTurn(
            **common,
            turn_id=own_id,
            parent_turn_id=None if parent is None else parent.turn_id,
            chain_id=own_id,  # the store sets the chain of a turn that extends another
            model=call.model or next(iter(captured.models), ""),
            messages=call.messages if parent is None else call.messages[parent.num_messages :],
            tools=call.tools if parent is None else None,
            response={field: value for field in MESSAGE_FIELDS if (value := message.get(field)) is not None},
            prompt_delta=prompt.between,
            prompt_length=prompt.length,
            token_ids=np.frombuffer(array("i", choice.token_ids), np.int32),
            finish_reason=choice.finish_reason,
            outcome=outcome,
            reason=reason,
            role=found.role,
            role_reason=found.reason,
            history_digest=digests.full,
            messages_digest=digests.messages,
            dialogue_digest=digests.dialogue,
            request_key=None if key is None else running.attempt.identity.stored_key(index),
            request_digest=None if key is None else running.attempt.identity.digest,
            encoded_logprobs=choice.logprobs,
            encoded_prompt=prompt.echo,
            encoded_routing=_routing(choice, prompt),
        )
        turns.append(turn)
    return turns


def _common(running: Running) -> dict[str, Any]:
    """Return the fields that all turns of a call have in common: of the request, the session, and times so far."""
    call, lane, session, first = running.call, running.lane, running.session, running.first_token_at
    return {
        "session_id": session.session_id,
        "tenant": session.tenant,
        "session_created_at": session.created_at,
        "step": call.step,
        "dialect": call.dialect.name,
        "sampling": call.sampling if lane is None else lane.engine.effective_sampling(call),
        "logprobs": NO_LOGPROBS,
        "policy_version_first": running.version_first,
        "policy_version_last": running.version_last,
        "inferred_by": running.placement.inferred_by,
        "created_at": running.created_at,
        "ttft_seconds": None if first is None else first - running.started,
        "duration_seconds": time.perf_counter() - running.started,
    }


class _Prompt(NamedTuple):
    """The prompt of a choice."""

    length: int
    between: TokenIds
    """The ids after the parent's; none where `echo` has the whole prompt."""
    echo: bytes
    """All ids of a prompt that extends no turn, as the engine's text; empty for a prompt that extends one."""
    is_as_sent: bool
    """Whether it is the planned prompt; also where the engine rendered it."""
    parent: KnownTurn | None


def _echoed_prompt(echo: bytes, plan: Plan) -> _Prompt:
    """Return the prompt that the engine says it sampled after."""
    sent = plan.prompt
    if sent is not None and (echo == SENT or echo == sent.json()[1:-1]):
        return _Prompt(sent.num_ids, plan.between, b"", True, plan.parent)
    return _Prompt(count_ids(echo), NO_IDS, echo, sent is None, None)


def _routing(choice: Choice, prompt: _Prompt) -> tuple[str, int, int] | None:
    """Return the experts of a call's tokens as the writer decodes them; None where the engine did not return them."""
    if choice.routed_experts is None:
        return None
    start = 0 if prompt.parent is None else prompt.length - len(prompt.between)
    return choice.routed_experts, start, prompt.length + len(choice.token_ids)


def _unsampled_reason(running: Running) -> str | None:
    """Return why no reply to the call can be trained; None if one can."""
    call, asked = running.call, "" if running.lane is None else running.lane.model
    if asked and not running.captured.models <= {asked}:
        return "another_model"
    if call.body.get("use_beam_search"):
        return "beam_search"
    return "media" if has_media(call.messages) else None


def _outcome(
    prompt: _Prompt, choice: Choice, plan: Plan, unsampled: str | None, *, aborted: str | None
) -> tuple[Outcome, str | None]:
    """Return the outcome of a choice, its logprobs not considered, and the reason: the first problem found."""
    if aborted is not None:
        return Outcome.ABORTED, aborted
    if not prompt.length:
        return Outcome.UNTRAINABLE, "no_prompt_ids"
    if not choice.token_ids:
        return Outcome.UNTRAINABLE, "no_token_ids"
    if unsampled is not None:
        return Outcome.UNTRAINABLE, unsampled
    if choice.finish_reason not in SAMPLED_ENDS:
        known = choice.finish_reason in CUT_OFF_ENDS
        return Outcome.UNTRAINABLE, f"engine_{choice.finish_reason}" if known else "engine_cut_off"
    if not prompt.is_as_sent:
        return Outcome.RETOKENISED, "echo_differs"
    return (Outcome.RETOKENISED if plan.is_retokenised else Outcome.EXACT), plan.reason


def known_turn(turn: NewTurn, running: Running, chain_id: str) -> KnownTurn:
    """Return what a session in memory needs to extend a turn of a call that was just stored in a chain."""
    plan, history, root = running.plan, running.placement.conversation.history, NO_ROOT
    if turn.parent_turn_id is None:
        root = running.root or read_root(turn.messages, turn.tools, turn.sampling)
    return KnownTurn.of(
        turn,
        root,
        chain_id=chain_id,
        num_messages=len(history.full) + 1,
        prompt_digest=history.messages[-1] if history.messages else b"",
        role=_chain_role(turn, plan),
        tokens=_all_ids(turn, plan),
    )


def _all_ids(turn: NewTurn, plan: Plan) -> EncodedIds:
    """Return a turn's prompt and sampled ids, with those of its parent."""
    sampled_ids, num_ids = ids_as_text(turn.token_ids), turn.prompt_length + len(turn.token_ids)
    if turn.encoded_prompt:  # a piece of its own, because a long one would be copied
        return encoded(sampled_ids, num_ids, encoded(turn.encoded_prompt, turn.prompt_length))
    own = [ids_as_text(turn.prompt_delta), sampled_ids]
    before = plan.parent_tokens if turn.parent_turn_id is not None else None
    return encoded(b",".join(filter(None, own)), num_ids, before)


def _chain_role(turn: NewTurn, plan: Plan) -> Role:
    """Return the role that the turns after this one have: a side call does not change the role of its chain."""
    if plan.parent is not None and turn.parent_turn_id is not None and plan.parent.role is not Role.RETRY:
        return plan.parent.role
    return turn.role or Role.MAIN
