"""The fake engine over HTTP: its replies, the request fields that it echoes, and its configurable faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.waiting import wait_until
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


def _stream(http: httpx2.Client, **more: Any) -> list[dict[str, Any]]:
    response = http.post(CHAT, json={"messages": HI, "stream": True, **more})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_half_a_character_is_a_chunk_with_ids_and_without_text(http):
    texts = {tuple(chunk["choices"][0].get("token_ids") or ()): chunk for chunk in _stream(http, return_token_ids=True)}
    # ü is C3 BC: the first byte adds no text yet
    assert texts[(0xC3,)]["choices"][0]["delta"] == {}


def test_sent_prompt_ids_are_ignored_where_a_message_carries_media(http):
    media = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    reply = _chat(http, messages=media, return_token_ids=True, kv_transfer_params={"prompt_token_ids": [1]})
    assert reply["prompt_token_ids"] != [1]


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


def test_a_cut_tool_call_stays_text(http):
    message = _chat(http, tools=TOOLS, max_tokens=12)["choices"][0]["message"]
    assert message["content"].startswith("<tool_call>\n{")
    assert "tool_calls" not in message


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


def test_a_reset_comes_before_the_first_byte(http):
    with pytest.raises(httpx2.TransportError):
        http.post(CHAT, json={"messages": HI}, headers={"X-Fake-Fault": "reset"})


def test_a_stream_is_reset_after_some_chunks(http):
    seen: list[str] = []
    headers = {"X-Fake-Fault": "reset_stream;after_chunks=3"}
    with http.stream("POST", CHAT, json={"messages": HI, "stream": True}, headers=headers) as response:
        lines = response.iter_lines()
        with pytest.raises(httpx2.TransportError):
            seen.extend(line for line in lines)
    # an interrupted `extend` keeps what came before
    assert len([line for line in seen if line.startswith("data: ")]) == 3


def test_a_plain_reply_is_reset_in_the_middle(http):
    with pytest.raises(httpx2.TransportError):
        http.post(CHAT, json={"messages": HI}, headers={"X-Fake-Fault": "reset_stream"})


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


def test_a_call_whose_client_disconnects_is_counted_as_aborted(fake_engine, http):
    with pytest.raises(httpx2.ReadTimeout):
        http.post(CHAT, json={"messages": HI}, headers={"X-Fake-Fault": "hang"}, timeout=0.2)
    wait_until(lambda: fake_engine.calls[0].outcome == "aborted", "the call is aborted")


def test_calls_wait_during_a_pause_and_are_answered_after_the_resume(http):
    http.post("/pause", params={"mode": "keep"})
    with pytest.raises(httpx2.ReadTimeout):
        http.post(CHAT, json={"messages": HI}, timeout=0.2)
    assert http.get("/health").status_code == 200
    http.post("/resume")
    assert _chat(http)["choices"]


def test_an_adapter_is_served_under_its_own_name_until_it_is_unloaded(fake_engine, http, tmp_path):
    fake_engine.state.script.lora = True
    (tmp_path / "adapter_config.json").write_text("{}")
    loading = {"lora_name": "a", "lora_path": str(tmp_path)}
    assert http.post("/v1/load_lora_adapter", json=loading).status_code == 200
    assert _chat(http, model="a")["model"] == "a"
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
    assert http.post(CHAT, json={"messages": HI, "model": "a"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"{}", 400),
        (b'{"messages": []}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "model": "x"}', 404),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 1}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}', 400),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": []}', 400),
    ],
)
def test_a_request_that_vllm_refuses_is_refused(http, body, status):
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert {"message", "type", "param", "code"} == response.json()["error"].keys()


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
