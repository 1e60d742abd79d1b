"""The experts that an engine returns with a reply are stored with the turn, and reach no client."""

from __future__ import annotations

import io

import httpx2
import numpy as np

from turnwise.chains import merge_session
from turnwise.fake_engine import Script, running_fake_engine

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
                timeout=60,
            )
            [choice] = answer.raise_for_status().json()["choices"]
            assert choice["routed_experts"] is None
            messages += [choice["message"], {"role": "user", "content": "Go on."}]
    turns = [view.turn for view in proxy.turns("s")]
    [chain] = merge_session(turns)
    assert len(chain.turns) == 2
    assert chain.routed_experts is not None
    expected = chain.tokens[:-1, None, None] + np.arange(LAYERS)[:, None] + np.arange(2)
    assert np.array_equal(chain.routed_experts[:-1], expected % 256)
    assert (chain.routed_experts[-1] == -1).all()
    own = [len(np.load(io.BytesIO(turn.routed_experts))) for turn in turns]
    sizes = [turn.prompt_delta.size + turn.token_ids.size for turn in turns]
    assert own == [sizes[0] - 1, sizes[1]]  # the second call routes the first one's last token; no turn repeats another


def test_an_array_that_cannot_be_read_does_not_cost_the_turn(start_proxy, monkeypatch):
    monkeypatch.setattr("turnwise.fake_engine.chat_wire._routing", lambda *_: "!not base64!")
    with running_fake_engine(Script(routed_layers=LAYERS)) as engine:
        proxy = start_proxy(engine.url)
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
        httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body, timeout=60).raise_for_status()
    [view] = proxy.turns("s")
    assert (view.turn.outcome, view.turn.routed_experts) == ("exact", None)


def test_a_streamed_turn_has_no_experts_and_is_trained_with_those_that_are_known(start_proxy):
    """vLLM's chunks have no field for them."""
    with running_fake_engine(Script(routed_layers=LAYERS)) as engine:
        proxy = start_proxy(engine.url)
        url, messages = f"{proxy.session_v1('s')}/chat/completions", [{"role": "user", "content": "Hello."}]
        answer = httpx2.post(url, json={"model": "fake", "messages": messages}, timeout=60).raise_for_status()
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        body = {"model": "fake", "messages": messages, "stream": True}
        with httpx2.stream("POST", url, json=body, timeout=60) as streamed:
            assert b"routed_experts" not in streamed.read()
    first, second = [view.turn for view in proxy.turns("s")]
    assert (second.outcome, second.parent_turn_id, second.routed_experts) == ("exact", first.turn_id, None)
    [chain] = merge_session([first, second])
    assert chain.routed_experts is not None
    num_routed = first.prompt_delta.size + first.token_ids.size - 1
    assert (chain.routed_experts[:num_routed] >= 0).all()
    assert (chain.routed_experts[num_routed:] == -1).all()
