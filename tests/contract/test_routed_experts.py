"""The experts that an engine returns with a reply are stored with the turn, and reach no client."""

import io

import httpx2
import numpy as np
from support.proxies import RunningProxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.chains import merge_session
from turnwise.features.experts import EXPERTS

LAYERS = 3


def test_a_chain_has_the_experts_of_all_tokens_but_its_last(start_proxy):
    """Two calls of one conversation, one of which asks for logprobs: the fake engine derives experts from tokens."""
    with running_fake_engine(Script(routed_layers=LAYERS)) as engine:
        proxy = start_proxy(engine.url)
        messages = [{"role": "user", "content": "Hello."}]
        for wanted in ({}, {"logprobs": True}):
            answer = httpx2.post(
                f"{proxy.session_v1('s')}/chat/completions",
                json={"model": "fake", "messages": messages, **wanted},
                timeout=WAIT_SECONDS,
            )
            [choice] = answer.raise_for_status().json()["choices"]
            assert choice["routed_experts"] is None
            messages += [choice["message"], {"role": "user", "content": "Go on."}]
    turns = [view.turn for view in proxy.turns("s")]
    [chain] = merge_session(turns)
    assert len(chain.turns) == 2
    assert EXPERTS in chain.parts
    expected = chain.tokens[:-1, None, None] + np.arange(LAYERS)[:, None] + np.arange(2)
    assert np.array_equal(chain.parts[EXPERTS][:-1], expected % 256)
    assert (chain.parts[EXPERTS][-1] == -1).all()
    own = [len(np.load(io.BytesIO(turn.parts[EXPERTS]))) for turn in turns]
    sizes = [turn.prompt_delta.size + turn.token_ids.size for turn in turns]
    assert own == [sizes[0] - 1, sizes[1]]  # the second call routes the first one's last token; no turn repeats another
    asked = [call.body.get("routed_experts_prompt_start") for call in engine.state.calls[-2:]]
    assert asked == [None, sizes[0] - 1], "of the second call, the experts of new tokens only"


def test_a_streamed_turn_has_no_experts_and_is_trained_with_those_that_are_known(start_proxy):
    """vLLM's chunks have no field for them."""
    with running_fake_engine(Script(routed_layers=LAYERS)) as engine:
        proxy = start_proxy(engine.url)
        messages = [{"role": "user", "content": "Hello."}]
        message = ask(proxy, {"messages": messages})["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "Go on."}]
        with httpx2.stream("POST", chat(proxy), json={"model": "fake", "messages": messages, "stream": True}) as answer:
            assert b"routed_experts" not in answer.read()
    first, second = [view.turn for view in proxy.turns("s")]
    assert (second.outcome, second.parent_turn_id, second.parts) == ("exact", first.turn_id, {})
    [chain] = merge_session([first, second])
    assert EXPERTS in chain.parts
    is_known = (chain.parts[EXPERTS] >= 0).all((1, 2))
    assert is_known.tolist() == [
        place < first.prompt_delta.size + first.token_ids.size - 1 for place in range(len(chain.tokens))
    ]


def test_the_experts_of_a_text_completion_are_stored_and_reach_no_client(start_proxy):
    with running_fake_engine(Script(routed_layers=LAYERS)) as engine:
        proxy = start_proxy(engine.url)
        answer = httpx2.post(f"{proxy.session_v1('s')}/completions", json={"model": "fake", "prompt": "Hello."})
        assert answer.raise_for_status().json()["choices"][0]["routed_experts"] is None
    [view] = proxy.turns("s")
    assert len(np.load(io.BytesIO(view.turn.parts[EXPERTS]))) == view.turn.prompt_length + view.turn.token_ids.size - 1


def test_experts_that_cannot_be_read_do_not_cost_the_turn_and_are_counted(start_proxy, monkeypatch):
    monkeypatch.setattr("turnwise_fake_engine.chat_wire.routing", lambda *_: "!not base64!")
    with running_fake_engine(Script(routed_layers=LAYERS)) as engine:
        proxy = start_proxy(engine.url)
        ask(proxy, {"messages": [{"role": "user", "content": "Hello."}]})
        counted = httpx2.get(f"{proxy.url}/metrics").text
    [view] = proxy.turns("s")
    assert (view.turn.outcome, view.turn.parts) == ("exact", {})
    assert 'turnwise_unreadable_routing_total{reason="not_base64"} 1.0' in counted


def chat(proxy: RunningProxy) -> str:
    return f"{proxy.session_v1('s')}/chat/completions"


def ask(proxy: RunningProxy, body: dict) -> dict:
    return httpx2.post(chat(proxy), json={"model": "fake", **body}).raise_for_status().json()
