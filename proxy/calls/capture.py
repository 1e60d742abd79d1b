"""Build the turns of a call from the engine's reply, each with its one outcome."""

from __future__ import annotations

import dataclasses
import datetime
from array import array
from typing import Any, NamedTuple

import numpy as np

from proxy.continuation.digests import has_media
from proxy.continuation.encoded_ids import EncodedIds, count_ids, encoded, ids_as_text
from proxy.continuation.forest import NO_ROOT, KnownTurn, Root
from proxy.continuation.plan import NO_IDS, Plan
from proxy.continuation.roles import Found, read_root
from proxy.dialects.base import Call
from proxy.dialects.captured import SENT, Captured, Choice
from proxy.writer.process import NewTurn
from turnwise.types import Json, Outcome, Role, Session, TokenIds

SAMPLED_ENDS = frozenset({"stop", "length", "tool_calls", "function_call"})
"""Finish reasons that a sampler ends with; a reply with any other was cut off by the engine."""
CUT_OFF_ENDS = frozenset({"abort", "error", "repetition"})
"""Other finish reasons of engines."""
NO_LOGPROBS = np.empty(0, np.float32)
MESSAGE_FIELDS = ("role", "content", "reasoning", "tool_calls", "refusal", "function_call", "annotations", "audio")
"""Fields of a reply that are stored."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Timing:
    """Times, policy versions and sampling of a call."""

    created_at: datetime.datetime
    ttft_seconds: float | None
    duration_seconds: float
    policy_version_first: int
    policy_version_last: int
    sampling: Json
    """How the engine sampled the call."""
    weights: str = ""
    """The model or adapter that the engine was asked to sample with; empty if it was not asked."""


def failed_turn(
    call: Call, timing: Timing, reason: str, *, turn_id: str, session: Session, inferred_by: str | None = None
) -> NewTurn:
    """Return the turn of a call without a completion: it stores the request and no tokens."""
    return NewTurn(
        **_common(call, timing, session, inferred_by),
        turn_id=turn_id,
        chain_id=turn_id,
        model=call.model,
        messages=call.messages,
        tools=call.tools,
        outcome=Outcome.ERROR,
        reason=reason,
    )


def build_turns(
    call: Call,
    plan: Plan,
    captured: Captured,
    timing: Timing,
    *,
    turn_id: str,
    session: Session,
    request_digest: bytes | None = None,
    inferred_by: str | None = None,
    found: Found | None = None,
    aborted: str | None = None,
) -> list[NewTurn]:
    """Return one turn per choice; the ids of later choices end in `#1`, `#2`.

    Args:
        call: the request.
        plan: its prompt.
        captured: the engine's reply.
        timing: its times and policy versions.
        turn_id: the completion's id.
        session: the session that it belongs to.
        request_digest: the digest of the request, stored under its idempotency key.
        inferred_by: the API key that identified the session; None if the call names its session.
        found: its role.
        aborted: what cut the reply off; None for a complete reply.
    """
    echo = _echoed_prompt(captured.prompt_ids, plan)
    unsampled = unsampled_reason(call)
    if timing.weights and not captured.models <= {timing.weights}:
        unsampled = "another_model"
    common = _common(call, timing, session, inferred_by)
    turns = []
    for index in sorted(captured.choices) or [0]:
        choice = captured.choices.get(index) or Choice()
        prompt = _echoed_prompt(choice.prompt_ids, plan) if choice.prompt_ids else echo
        parent = prompt.parent
        unplanned = None if index < call.num_choices else "unplanned_choice"
        outcome, reason = _outcome(prompt, choice, plan, unplanned or unsampled, aborted=aborted)
        digests = plan.history.extended(choice.message)
        own_id = turn_id if index == 0 else f"{turn_id}#{index}"
        key = call.idempotency_key if aborted is None else None  # a retry of a reply that was cut off samples again
        turn = NewTurn(
            **common,
            turn_id=own_id,
            parent_turn_id=None if parent is None else parent.turn_id,
            chain_id=own_id,  # the store sets the chain of a turn that extends another
            model=call.model or next(iter(captured.models), ""),
            messages=call.messages if parent is None else call.messages[parent.num_messages :],
            tools=call.tools if parent is None else None,
            response={field: value for field in MESSAGE_FIELDS if (value := choice.message.get(field)) is not None},
            prompt_delta=prompt.between,
            prompt_length=prompt.length,
            token_ids=np.frombuffer(array("i", choice.token_ids), np.int32),
            finish_reason=choice.finish_reason,
            outcome=outcome,
            reason=reason,
            role=found and found.role,
            role_reason=found and found.reason,
            history_digest=digests.full,
            messages_digest=digests.messages,
            dialogue_digest=digests.dialogue,
            request_key=None if key is None else request_key(key, index),
            request_digest=None if key is None else request_digest,
            encoded_logprobs=choice.logprobs,
            encoded_prompt=prompt.echo,
            encoded_routing=_routing(choice, prompt),
        )
        turns.append(turn)
    return turns


def _common(call: Call, timing: Timing, session: Session, inferred_by: str | None) -> dict[str, Any]:
    """Return the fields that all turns of a call have in common: of the request, the session and the timing."""
    return {
        "session_id": session.session_id,
        "tenant": session.tenant,
        "step": call.step,
        "dialect": call.dialect.name,
        "sampling": timing.sampling,
        "logprobs": NO_LOGPROBS,
        "policy_version_first": timing.policy_version_first,
        "policy_version_last": timing.policy_version_last,
        "inferred_by": inferred_by,
        "created_at": timing.created_at,
        "ttft_seconds": timing.ttft_seconds,
        "duration_seconds": timing.duration_seconds,
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


def request_key(idempotency_key: str, index: int) -> str:
    """Return the key under which a retry finds a stored choice."""
    return f"{idempotency_key}#{index}"


def unsampled_reason(call: Call) -> str | None:
    """Return why no reply to the call can be trained; None if one can."""
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


def root_of(call: Call, timing: Timing) -> Root:
    """Return what a call without a parent shows about its chain: what is read from its stored turn after a restart."""
    return read_root(call.messages, call.tools, timing.sampling)


def known_turn(turn: NewTurn, plan: Plan, chain_id: str, root: Root | None = None) -> KnownTurn:
    """Return what a session in memory needs to extend a turn that was just stored.

    Args:
        turn: the turn.
        plan: its prompt.
        chain_id: its chain.
        root: `root_of` its call, if it has been read.
    """
    if turn.parent_turn_id is not None:
        root = NO_ROOT
    elif root is None:
        root = read_root(turn.messages, turn.tools, turn.sampling)
    return KnownTurn.of(
        turn,
        root,
        chain_id=chain_id,
        num_messages=len(plan.history.full) + 1,
        prompt_digest=plan.history.messages[-1] if plan.history.messages else b"",
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
