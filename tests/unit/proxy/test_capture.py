"""From the engine's reply to turns: their parent, their stored fields, and their single outcome."""

import dataclasses
import json
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from support.conversations import conversation_of

from proxy.calls.capture import Running, build_turns, failed_turn, remembered
from proxy.calls.retries import Attempt
from proxy.dialects.base import SENT, Call, Captured, Choice
from proxy.dialects.chat import ChatCompletions
from proxy.engines.engine import Engine, Lane
from proxy.sessions.forest import KnownTurn, encode_ids
from proxy.sessions.memory import LiveSession, known_turns
from proxy.sessions.place import CallPlace
from proxy.writer.client import row_of
from proxy.writer.process import NewTurn, complete
from turnwise.store.rows import ids_from_blob, logprobs_from_blob
from turnwise.types import Json, Outcome, Role, Session

SESSION = Session(session_id="s", tenant="team")
USER: Json = {"role": "user", "content": "Hello."}
REPLY: Json = {"role": "assistant", "content": "Hi."}
PROMPT = [1, 2, 3]
PROMPT_TEXT = b"1,2,3"


def call_of(*messages: Json, key: str | None = None, **fields: Any) -> Call:
    call = ChatCompletions().parse({"messages": list(messages), **fields})
    call.idempotency_key = key
    return call


def choice(*token_ids: int, logprobs: list[float | None] | None = None, **fields: Any) -> Choice:
    """Return a choice; each token has a logprob of minus a tenth of its id."""
    found = [-token / 10 for token in token_ids] if logprobs is None else logprobs
    encoded = json.dumps({"content": [{"logprob": logprob} for logprob in found]}).encode()
    return Choice(fields=dict(REPLY), token_ids=list(token_ids), logprobs=[encoded], finish_reason="stop", **fields)


def place_of(call: Call, reason: str | None = None) -> CallPlace:
    live = LiveSession(SESSION)
    return CallPlace(live, SESSION, live.forests[0], conversation_of(call), reason=reason)


def extending(call: Call) -> CallPlace:
    """Return the place of a call whose prompt is [1, 2, 3, 4]: the parent's [1, 2, 3] and one token after it."""
    place = place_of(call)
    place.parent = KnownTurn(
        turn_id="parent",
        parent_turn_id=None,
        chain_id="root",
        num_messages=2,
        history_digest=b"",
        messages_digest=b"",
        dialogue_digest=b"",
    )
    tokens, place.between = encode_ids(np.array([1, 2, 3], np.int32)), np.array([4], np.int32)
    place.prompt = encode_ids(place.between, tokens)
    return place


def stored(turn: NewTurn) -> NewTurn:
    row = complete(row_of(turn))
    return dataclasses.replace(
        turn,
        outcome=Outcome(row["outcome"]),
        reason=row["reason"],
        prompt_delta=ids_from_blob(row["prompt_delta"]),
        logprobs=logprobs_from_blob(row["logprobs"]),
    )


def running(call: Call, place: CallPlace, captured: Captured, **fields: Any) -> Running:
    """Return a call with what the engine has answered: the first token came after half a second."""
    attempt = Attempt(
        ("team", "key", "s"), call.idempotency_key, b"digest", ("chat", False), (), "1", "chatcmpl-1", Future()
    )
    given = {"started": 100.0, "first_token_at": 100.5, "version_first": 3, "version_last": 4, **fields}
    return Running(call, place, attempt=attempt, captured=captured, **given)


def built(call: Call, place: CallPlace, captured: Captured, *, aborted: str | None = None) -> list[NewTurn]:
    return list(map(stored, build_turns(running(call, place, captured), aborted=aborted)))


def in_memory(turn: NewTurn, sampled: Running, chain_id: str) -> KnownTurn:
    (known,) = remembered(sampled, [dataclasses.replace(turn, chain_id=chain_id)])
    return known


def only(turns: list[NewTurn]) -> NewTurn:
    (turn,) = turns
    return turn


def test_the_first_turn_of_a_chain_stores_all_that_the_call_captured():
    call = call_of(USER, tools=[{"type": "function"}], temperature=0.5)
    captured = Captured(PROMPT_TEXT, {0: choice(7, 8)}, models={"served"})
    captured.choices[0].fields |= {"unheard_of": 1, "refusal": None}
    turn = only(built(call, place_of(call), captured))
    assert (turn.turn_id, turn.chain_id, turn.parent_turn_id) == ("chatcmpl-1", "chatcmpl-1", None)
    assert (turn.session_id, turn.tenant, turn.model, turn.dialect) == ("s", "team", "served", "chat")
    assert (turn.messages, turn.tools, turn.response) == ([USER], [{"type": "function"}], REPLY)
    assert turn.sampling == {"temperature": 0.5}
    assert (turn.prompt_delta.tolist(), turn.prompt_length, turn.token_ids.tolist()) == (PROMPT, 3, [7, 8])
    assert turn.logprobs.tolist() == pytest.approx([-0.7, -0.8])
    assert (turn.policy_version_first, turn.policy_version_last, turn.ttft_seconds) == (3, 4, 0.5)
    assert (turn.outcome, turn.reason, turn.finish_reason) == (Outcome.EXACT, None, "stop")


@pytest.mark.parametrize(
    ("captured", "reason"),
    [
        (Captured(b"", {0: choice(7)}), "no_prompt_ids"),
        (Captured(PROMPT_TEXT, {0: choice()}), "no_token_ids"),
        (Captured(PROMPT_TEXT, {}), "no_token_ids"),
        (Captured(PROMPT_TEXT, {0: choice(7, 8, logprobs=[-0.1])}), "no_logprobs"),
        (Captured(PROMPT_TEXT, {0: choice(7, 8, logprobs=[-0.1, None])}), "no_logprobs"),
        (Captured(PROMPT_TEXT, {0: choice(7, 8, logprobs=[-0.1, -9999.0])}), "impossible_logprobs"),
        (Captured(PROMPT_TEXT, {0: choice(7, 8, logprobs=[-9999.0, None])}), "no_logprobs"),
    ],
)
def test_a_turn_that_cannot_be_trained_is_stored_with_its_reason(captured, reason):
    """A missing logprob would be NaN, and so would the loss."""
    call = call_of(USER)
    turn = only(built(call, place_of(call), captured))
    assert (turn.outcome, turn.reason) == (Outcome.UNTRAINABLE, reason)


def test_a_reason_makes_a_turn_retokenised_and_a_cut_makes_it_aborted():
    """The cut takes precedence over the reason; the partial reply is stored."""
    call = call_of(USER, REPLY, USER)
    turn = only(built(call, place_of(call, "edited_history"), Captured(PROMPT_TEXT, {0: choice(7)})))
    assert (turn.outcome, turn.reason) == (Outcome.RETOKENISED, "edited_history")
    cut_off = Captured(PROMPT_TEXT, {0: choice(7, logprobs=[])})
    turn = only(built(call, place_of(call, "edited_history"), cut_off, aborted="client_left"))
    assert (turn.outcome, turn.reason, turn.token_ids.tolist()) == (Outcome.ABORTED, "client_left", [7])


def test_an_extension_stores_the_messages_after_its_parent():
    """[1, 2, 3] belongs to the parent; [4] and the new message belong to this turn. The store assigns its chain."""
    call = call_of(USER, REPLY, USER, tools=[{"type": "function"}])
    place = extending(call)
    sampled = running(call, place, Captured(b"1,2,3,4", {0: choice(7)}))
    turn = stored(only(build_turns(sampled)))
    assert (turn.parent_turn_id, turn.outcome) == ("parent", Outcome.EXACT)
    assert (turn.prompt_delta.tolist(), turn.prompt_length, turn.messages, turn.tools) == ([4], 4, [USER], None)
    known = in_memory(turn, sampled, "root")
    assert known.tokens.decoded().tolist() == [1, 2, 3, 4, 7]
    assert (known.num_messages, known.history_digest, known.chain_id) == (4, turn.history_digest, "root")


def test_a_turn_whose_engine_echoes_another_prompt_starts_a_chain():
    """The echoed prompt is stored as the turn's own, and the parent is dropped."""
    call = call_of(USER, REPLY, USER)
    place = extending(call)
    sampled = running(call, place, Captured(b"1,2,9,4", {0: choice(7)}))
    turn = stored(only(build_turns(sampled)))
    assert (turn.outcome, turn.reason) == (Outcome.RETOKENISED, "echo_differs")
    assert (turn.parent_turn_id, turn.chain_id) == (None, "chatcmpl-1")
    assert (turn.prompt_delta.tolist(), turn.messages) == ([1, 2, 9, 4], call.messages)
    assert in_memory(turn, sampled, "chatcmpl-1").tokens.decoded().tolist() == [1, 2, 9, 4, 7]


@pytest.mark.parametrize(("limit", "task"), [(None, "probe"), (2, "probe"), (50, "asks_for_title")])
def test_a_restart_finds_the_same_side_task_as_memory_has_under_the_engines_defaults(limit, task):
    """The defaults limit a call without a limit to two tokens. A limit of four or less makes a call a probe."""
    call = call_of({"role": "user", "content": "Write a title."}, max_tokens=limit)
    engine = Engine("http://127.0.0.1:1", timeout_seconds=1.0)
    engine.defaults, engine.has_tool_grammar = {"max_tokens": 2}, False
    sampled = running(call, place_of(call), Captured(PROMPT_TEXT, {0: choice(7)}), lane=Lane(engine))
    (built_turn,) = build_turns(sampled)
    kept = in_memory(built_turn, sampled, "chatcmpl-1")
    turn = stored(built_turn)
    (read,) = known_turns([turn], {}, frozenset())
    assert (kept.side_task, kept.system_digest) == (task, read.system_digest)
    assert read.side_task == task


def test_each_of_several_choices_extends_the_parent():
    call = call_of(USER, REPLY, USER, n=2, key="k")
    captured = Captured(SENT, {1: choice(8), 0: choice(7)})
    turns = built(call, extending(call), captured)
    assert [(turn.turn_id, turn.parent_turn_id, turn.request_key) for turn in turns] == [
        ("chatcmpl-1", "parent", "key\nk#0"),
        ("chatcmpl-1#1", "parent", "key\nk#1"),
    ]


def test_only_a_complete_reply_is_found_by_its_key():
    call = call_of(USER, key="k")
    captured = Captured(PROMPT_TEXT, {0: choice(7)})
    assert only(built(call, place_of(call), captured)).request_key == "key\nk#0"
    assert only(built(call, place_of(call), captured, aborted="client_left")).request_key is None


def test_a_call_without_a_reply_stores_its_request():
    call = call_of(USER, key="k")
    failed = running(call, place_of(call), Captured())
    failed.place.inferred_by = "key"
    turn = failed_turn(failed, "engine_500")
    assert (turn.outcome, turn.reason, turn.request_key) == (Outcome.ERROR, "engine_500", None)
    assert (turn.messages, turn.inferred_by, turn.token_ids.size) == ([USER], "key", 0)


def test_the_turns_after_a_side_call_have_the_role_of_their_chain():
    """In memory, and after a restart, which reads the side call from the store."""
    call = call_of(USER, REPLY, {"role": "user", "content": "Summarize our conversation so far."})
    place = extending(call)
    place.parent.role = Role.SUB_AGENT
    sampled = running(call, place, Captured(SENT, {0: choice(7)}))
    turn = only(build_turns(sampled))
    assert (turn.role, turn.role_reason) == (Role.SIDE, "compaction_prompt")
    assert in_memory(turn, sampled, "root").role is Role.SUB_AGENT
    (read,) = known_turns([stored(turn)], {"parent": place.parent}, frozenset())
    assert read.role is Role.SUB_AGENT
