"""Turns that violate the assumptions of training are untrainable with a reason; clients cannot control the engine."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from support.proxies import ProxyAndEngine, RunningProxy
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine

from turnwise.types import Outcome

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


def ask(proxy: RunningProxy, session_id: str, **fields: Any) -> httpx2.Response:
    asked = {"messages": [{"role": "user", "content": "Hello there"}], **fields}
    reply = httpx2.post(f"{proxy.session_v1(session_id)}/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_reply_that_the_engine_cut_off_is_untrainable(
    proxy: RunningProxy, shared_engine: RunningFakeEngine, session_id: str, reason: Any, *, stream: bool
) -> None:
    shared_engine.answer(Rule(reply=Reply(text="One two", finish_reason=reason)))
    ask(proxy, session_id, stream=stream)
    (view,) = proxy.turns(session_id)
    assert (view.turn.outcome, view.turn.reason) == (Outcome.UNTRAINABLE, f"engine_{reason}")


def test_beam_search_and_media_are_untrainable(
    proxy: RunningProxy, shared_engine: RunningFakeEngine, session_id: str
) -> None:
    assert shared_engine.url
    ask(proxy, session_id, use_beam_search=True)
    ask(proxy, session_id, messages=[{"role": "user", "content": [{"type": "text", "text": "Look."}, PICTURE]}])
    ask(proxy, session_id)
    ended = [(view.turn.outcome, view.turn.reason) for view in proxy.turns(session_id)]
    assert ended == [(Outcome.UNTRAINABLE, "beam_search"), (Outcome.UNTRAINABLE, "media"), (Outcome.EXACT, None)]


def test_fields_that_control_the_engine_are_removed_and_counted(
    proxy: RunningProxy, shared_engine: RunningFakeEngine, session_id: str
) -> None:
    steering = {"kv_transfer_params": {"prompt_token_ids": [1]}, "vllm_xargs": {"a": 1}, "priority": -5}
    pinned = {"session_id": session_id, "sampling": {"min_p": 0.5}}
    httpx2.post(f"{proxy.v1}/sessions", json=pinned).raise_for_status()
    ask(proxy, session_id, **steering, top_k=3)
    sent = shared_engine.calls[-1].body
    assert not steering.keys() & sent.keys()
    assert (sent["top_k"], sent["min_p"]) == (3, 0.5)
    httpx2.post(f"{proxy.v1}/completions", json={"prompt": "x", "max_tokens": 1, **steering}).raise_for_status()
    assert not steering.keys() & shared_engine.calls[-1].body.keys()
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    assert 'turnwise_dropped_fields_total{field="kv_transfer_params"} 2.0' in metrics
