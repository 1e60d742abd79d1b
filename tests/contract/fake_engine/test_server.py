"""The fake engine over HTTP: its replies, the request fields that it echoes, and its configurable faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, tokens

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Grüße 7"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
]
ALL = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}


@pytest.fixture
def http(fake_engine: RunningFakeEngine) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=fake_engine.url, timeout=60.0, trust_env=False) as client:
        yield client


def _chat(http: httpx2.Client, **more: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": HI, **more})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_tool_is_called_with_arguments_from_its_own_schema(http):
    choice = _chat(http, tools=TOOLS, return_token_ids=True)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    function = choice["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("look", {"n": 7})
    text = tokens.decode(choice["token_ids"])
    assert text == '<tool_call>\n{"name": "look", "arguments": {"n": 7}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("choice", "finish_reason", "calls"),
    [
        ("none", "stop", False),
        ("required", "tool_calls", True),
        ({"type": "function", "function": {"name": "look"}}, "stop", True),
    ],
)
def test_tool_choice_is_obeyed(http, choice, finish_reason, calls):
    answer = _chat(http, tools=TOOLS, tool_choice=choice)["choices"][0]
    assert answer["finish_reason"] == finish_reason
    assert ("tool_calls" in answer["message"]) is calls


def test_json_is_generated_from_the_requested_schema(http):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(_chat(http, response_format=asked)["choices"][0]["message"]["content"]) == {"n": 7}


def test_hidden_reasoning_hides_its_ids_and_logprobs(fake_engine, http):
    fake_engine.answer(Rule(reply=Reply(text="yes", reasoning="hm")))
    visible, hidden = _chat(http, **ALL)["choices"][0], _chat(http, include_reasoning=False, **ALL)["choices"][0]
    assert (visible["message"]["reasoning"], visible["message"]["content"]) == ("hm", "yes")
    assert tokens.decode(visible["token_ids"]).startswith("<think>\nhm\n</think>")
    assert (hidden["message"]["reasoning"], hidden["token_ids"], hidden["logprobs"]) == (None, None, None)


def test_a_rule_answers_the_conversations_that_it_matches(fake_engine, http):
    fake_engine.answer(Rule(contains="weather", reply=Reply(text="rain"), count=1))
    weather = [{"role": "user", "content": "the weather?"}]
    texts = [_chat(http, messages=messages)["choices"][0]["message"]["content"] for messages in (HI, weather, weather)]
    assert texts == ["Grüße 7", "rain", "the weather?"]


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_status_fault_is_answered_in_openais_error_shape(http, status):
    response = http.post(CHAT, json={"messages": HI}, headers={"X-Fake-Fault": f"status;status={status}"})
    assert response.status_code == status
    assert response.json()["error"]["code"] == status


def test_a_fault_of_the_control_route_occurs_the_configured_number_of_times(http):
    http.post("/fake/faults", json={"kind": "status", "status": 429, "count": 2})
    statuses = [http.post(CHAT, json={"messages": HI}).status_code for _ in range(3)]
    assert statuses == [429, 429, 200]


def test_malformed_json_and_missing_ids_can_be_configured(http):
    broken = http.post(CHAT, json={"messages": HI}, headers={"X-Fake-Fault": "malformed"})
    with pytest.raises(json.JSONDecodeError):
        broken.json()
    bare = http.post(CHAT, json={"messages": HI, **ALL}, headers={"X-Fake-Fault": "no_token_ids"}).json()
    assert (bare["prompt_token_ids"], bare["choices"][0]["token_ids"]) == (None, None)


def test_completions_take_texts_and_ids_and_echo_them(http):
    made = http.post("/v1/completions", json={"prompt": [72, 105], "echo": True, "logprobs": 1, "n": 2}).json()
    assert [choice["text"] for choice in made["choices"]] == ["HiHi", "HiHi (1)"]
    logprobs = made["choices"][0]["logprobs"]
    # two echoed bytes, two sampled ones, the end of turn
    assert len(logprobs["token_logprobs"]) == 5
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    for prompt in ([72, -1], [[72], [10**6]]):
        assert http.post("/v1/completions", json={"prompt": prompt}).status_code == 400
