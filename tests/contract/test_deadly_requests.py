"""Requests that would crash a vLLM with LoRA: the proxy refuses them and sends nothing to the engine."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from support.proxies import StartProxy
from turnwise_fake_engine import Script, running_fake_engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}]}
DEADLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {**PLAIN, "prompt_logprobs": 1}, "prompt_logprobs"),
    "chat, none but the prompt's own": (CHAT, {**PLAIN, "prompt_logprobs": 0}, "prompt_logprobs"),
    "chat, streamed": (CHAT, {**PLAIN, "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    "chat, echo": (CHAT, {**PLAIN, "echo": True}, "echo"),
    "text": (TEXT, {"prompt": "Hello.", "prompt_logprobs": 1}, "prompt_logprobs"),
}


def test_a_request_that_would_crash_an_engine_with_lora_is_refused(start_proxy: StartProxy):
    """The error names the field and the alternative, and is stored; the same call without the field is served."""
    with running_fake_engine(Script(lora=True)) as engine:
        proxy = start_proxy(engine.url)
        engine.calls.clear()
        with httpx2.Client(base_url=proxy.url) as http:
            for name, (path, body, field) in DEADLY.items():
                refused = http.post(path, json=body)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["param"]) == (400, "engine_has_lora", field), name
                assert "started without --lora" in error["message"]
            assert engine.calls == []
            stored = [(view.turn.outcome, view.turn.reason) for view in proxy.turns()]
            assert stored == [("error", "engine_has_lora")] * len(DEADLY)
            assert http.post(CHAT, json={**PLAIN, "echo": False, "prompt_logprobs": None}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_same_request_is_sent_to_an_engine_without_lora(path: str, start_proxy: StartProxy):
    with running_fake_engine() as engine:
        proxy = start_proxy(engine.url)
        asked = {"prompt": "Hello."} if path == TEXT else PLAIN
        assert httpx2.post(proxy.url + path, json={**asked, "prompt_logprobs": 1}).status_code == 200
        assert engine.calls[-1].body["prompt_logprobs"] == 1
