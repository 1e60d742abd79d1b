"""A bad request gets a status, a code and a sentence, and nothing is stored for it."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.control_plane import metric
from support.proxies import ProxyAndEngine
from support.tiny_checkpoints import write_weights
from turnwise_fake_engine import Fault, FaultKind, Script, running_fake_engine

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
Shared = tuple[ProxyAndEngine, httpx2.Client]


@pytest.fixture(scope="module")
def shared(shared_proxy: ProxyAndEngine) -> Iterator[Shared]:
    with httpx2.Client(base_url=shared_proxy.proxy.url) as http:
        yield shared_proxy, http


def refusal(reply: httpx2.Response, status: int, code: Any) -> str:
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    message = reply.json()["error"]["message"]
    assert isinstance(message, str)
    return message


def post_raw(http: httpx2.Client, path: str, body: bytes) -> httpx2.Response:
    return http.post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"text"', b'{"messages": NaN}', b"\xff", b'{"a": "\\ud800"}'])
def test_a_broken_body_of_a_call_is_refused(shared, body):
    _, http = shared
    assert "JSON" in refusal(post_raw(http, "/v1/chat/completions", body), 400, "invalid_json")


def test_a_refusal_is_counted_by_the_code_that_the_client_reads(shared):
    """A request that the engine refuses is no error of the proxy's own."""
    running, http = shared
    cases = [
        ("/v1/chat/completions", {**CHAT, "n": 0}, "engine_400"),
        ("/v1/chat/completions", [], "invalid_json"),
        ("/v1/responses", {"model": "fake", "input": "x", "previous_response_id": "x"}, "previous_response_not_found"),
        ("/v1/policies/7/activate", {}, "not_found"),
    ]
    for path, body, code in cases:
        before = metric(running.proxy, "turnwise_refused_total", code=code)
        internal = metric(running.proxy, "turnwise_refused_total", code="internal_error")
        assert http.post(path, json=body).status_code >= 400
        assert metric(running.proxy, "turnwise_refused_total", code=code) == before + 1, path
        assert metric(running.proxy, "turnwise_refused_total", code="internal_error") == internal


@pytest.mark.parametrize("value", ["NaN", "inf", "-Infinity", 10**400, None, {}, 1e308, -1e40])
def test_a_reward_that_is_not_a_number_of_usual_size_is_refused(shared, value):
    """Two lines of 1e308 would sum to infinity, and one of 1e40 is infinite in float32."""
    _, http = shared
    body = json.dumps({"session_id": "s", "value": value}).encode()
    assert refusal(post_raw(http, "/v1/rewards", body), 422, "invalid_request")


def test_a_request_takes_a_thousand_reward_lines_and_four_megabytes(shared):
    _, http = shared
    line = {"session_id": "many", "value": 1.0}
    http.post("/v1/sessions", json={"session_id": "many"}).raise_for_status()
    message = refusal(http.post("/v1/rewards", json=[line] * 1001), 422, "invalid_request")
    assert "at most 1000 items" in message
    assert http.post("/v1/rewards", json=[line] * 1000).status_code == 200
    body = b'[{"session_id": "many", "value": 1.0, "source": "%b"}]' % (b"x" * 2**22)
    refusal(post_raw(http, "/v1/rewards", body), 413, "too_large")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1e9, "`value`: 1000000000.0 is no number from -1e6 to 1e6"),
        (-1e9, "`value`: -1000000000.0 is no number from -1e6 to 1e6"),
        (10**400, "is no number from -1e6 to 1e6"),
        ("", "`value`: a text has 1 to"),
        (["a"], "`value`: true or false, a number or a text, not a list"),
        ({"a": 1}, "`value`: true or false, a number or a text, not a dict"),
    ],
)
def test_feedback_with_a_wrong_value_is_told_what_is_wrong_with_it(shared, value, message):
    _, http = shared
    line = {"session_id": "s", "kind": "float", "value": value}
    assert message in refusal(post_raw(http, "/v1/feedback", json.dumps(line).encode()), 422, "invalid_request")


def test_a_reward_for_an_unknown_target_is_not_found(shared):
    """The other lines of the request are not stored either."""
    both, http = shared
    turn_id = http.post("/sessions/judged/v1/chat/completions", json=CHAT).raise_for_status().json()["id"]
    good = {"turn_id": turn_id, "value": 1.0}
    for bad in ({"turn_id": "chatcmpl-none"}, {"session_id": "none"}, {"session_id": "judged", "step": 7}):
        refusal(http.post("/v1/rewards", json=[good, {**bad, "value": 1.0}]), 404, "not_found")
    assert "not both" in refusal(http.post("/v1/rewards", json={**good, "step": 0}), 422, "invalid_request")
    assert [len(view.rewards) for view in both.proxy.turns("judged")] == [0]


@pytest.mark.parametrize(
    ("headers", "metadata", "param"),
    [({"x-step": bad}, {}, "step") for bad in ("-1", "two", "9" * 12)]
    + [({"x-session-id": bad}, {}, "session_id") for bad in ("..", "a b", "a/b", "x" * 257)]
    + [({"idempotency-key": "k" * 257}, {}, "Idempotency-Key")]
    + [({}, {"step": bad}, "step") for bad in (1.5, True, [], -1, 10**12)]
    + [({}, {"session_id": bad}, "session_id") for bad in (5, ["x"])],
)
def test_an_invalid_identity_is_refused(shared, headers, metadata, param):
    _, http = shared
    reply = http.post("/v1/chat/completions", json={**CHAT, "metadata": metadata}, headers=headers)
    refusal(reply, 400, "invalid_request")
    assert reply.json()["error"]["param"] == param


def test_metadata_of_an_application_may_hold_any_text(shared):
    """Its own `step` is no step of ours, and its own `session_id` names a session whatever it contains."""
    both, http = shared
    for step in ("search", "-1", "9" * 12):
        body = {**CHAT, "metadata": {"step": step, "session_id": "user 42/é"}}
        reply = http.post("/v1/chat/completions", json=body).raise_for_status()
        assert reply.headers["x-session-id"].startswith("metadata:")
    turns = both.proxy.turns(reply.headers["x-session-id"])
    assert [view.turn.step for view in turns] == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [{"messages": "hi"}, {"messages": [1]}, {"n": "2"}, {"tools": {}}, {"model": 3}],
)
def test_a_field_that_the_proxy_reads_is_validated(shared, change):
    _, http = shared
    reply = http.post("/v1/chat/completions", json={**CHAT, **change})
    refusal(reply, 400, "invalid_request")
    assert reply.json()["error"]["param"] == next(iter(change))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("field", "value"), [("content", 5), ("tool_calls", 5), ("role", ["x"]), ("content", [[]])])
def test_a_message_of_any_shape_is_passed_to_the_engine(shared, place, field, value):
    """Before a reply, as the reply, and after it: the proxy digests it, starts a new chain, and calls the engine."""
    both, http = shared
    path = f"/sessions/odd-{place}-{field}-{type(value).__name__}/v1/chat/completions"
    answer = http.post(path, json=CHAT).raise_for_status().json()["choices"][0]["message"]
    messages = [*CHAT["messages"], answer, {"role": "user", "content": "On."}]
    messages[place] = {**messages[place], field: value}
    asked = len(both.engine.calls)
    http.post(path, json={**CHAT, "messages": messages})
    assert len(both.engine.calls) == asked + 1
    assert both.engine.calls[-1].body["messages"] == messages


def messages_call(content, role: str = "user") -> dict:
    return {"messages": [{"role": "user", "content": "Hi."}, {"role": role, "content": content}]}


def google_number(number: str) -> dict:
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "maxLength": number}}}
    return {"tools": [{"functionDeclarations": [{"name": "f", "parameters": schema}]}]}


WHOLE: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "fake", "messages": CHAT["messages"], "max_tokens": 5},
    "/v1/responses": {"model": "fake", "input": "Hi."},
    "/v1beta/models/fake:generateContent": {"contents": [{"parts": [{"text": "Hello."}]}]},
}
MESSAGES, RESPONSES, GOOGLE = WHOLE
SHAPES = dict(zip(WHOLE, ("type message", "message type param code", "code message status details"), strict=True))
"""The fields of an error in each format."""
ABSENT = object()
UNTRANSLATABLE: list[tuple[str, dict[str, Any], int, str]] = [
    (MESSAGES, {"max_tokens": ABSENT}, 400, "max_tokens"),
    (MESSAGES, {"messages": ABSENT}, 400, "messages"),
    (MESSAGES, {"model": "policy-v0"}, 404, "is not served"),
    (MESSAGES, {"messages": [{"role": "x", "content": "x"}]}, 400, "'x'"),
    (MESSAGES, {"tools": [3]}, 400, "input_schema"),
    (MESSAGES, {"system": 5}, 400, "system"),
    (MESSAGES, {"system": ["Be brief."]}, 400, ""),
    (MESSAGES, {"output_config": {"format": 5}}, 400, "format"),
    (MESSAGES, {"output_config": {"effort": ["high"]}}, 400, "effort"),
    (MESSAGES, {"tool_choice": {"type": ["auto"]}}, 400, ""),
    (MESSAGES, messages_call([{"type": "tool_result", "content": 5}]), 400, "content"),
    (MESSAGES, messages_call([{"type": "tool_result", "content": [5]}]), 400, ""),
    (MESSAGES, messages_call([{"type": "image", "source": 5}]), 400, "source"),
    (
        MESSAGES,
        messages_call([{"type": "image", "source": {"type": "file", "file_id": "f"}}]),
        400,
        "send its source as",
    ),
    (RESPONSES, {"input": ABSENT}, 400, "input"),
    (RESPONSES, {"input": [{"type": "song"}]}, 400, "song"),
    (RESPONSES, {"background": True}, 400, "background"),
    (RESPONSES, {"tools": [{"name": "look"}]}, 400, "type"),
    (RESPONSES, {"conversation": {}}, 400, "`conversation` is an id"),
    (RESPONSES, {"conversation": "conv_1", "previous_response_id": "resp_1"}, 400, "not both"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_abc_0"}]}, 404, "msg_abc_0"),
    (RESPONSES, {"input": [{"role": "user", "content": 5}]}, 400, "`input`"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]}, 400, ""),
    (RESPONSES, {"input": [{"role": "assistant", "content": 5}]}, 400, "`input`"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": 5}]}, 400, "`input`"),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": 5}]}, 400, "`input`"),
    (RESPONSES, {"text": {"format": 5}}, 400, "format"),
    *((GOOGLE, google_number(number), 400, "") for number in ("abc", "1.x", "1e999.", "9" * 5000)),
]


@pytest.mark.parametrize(("path", "change", "status", "named"), UNTRANSLATABLE)
def test_what_cannot_be_translated_for_the_engine_is_refused_by_name_in_the_shape_of_the_client(
    shared, path, change, status, named
):
    """The proxy translates the other formats before it calls the engine."""
    both, http = shared
    asked = len(both.engine.calls)
    body = {field: value for field, value in (WHOLE[path] | change).items() if value is not ABSENT}
    reply = http.post(path, json=body)
    assert (reply.status_code, len(both.engine.calls)) == (status, asked), reply.text
    error = reply.json()
    assert set(error["error"]) == set(SHAPES[path].split())
    assert named in error["error"]["message"]
    assert (error.get("type") == "error") == (path == MESSAGES)


@pytest.mark.parametrize(("kind", "field"), [("text", "content"), ("thinking", "reasoning")])
def test_a_number_in_place_of_text_in_a_repeated_reply_is_read_as_text(shared, kind, field):
    both, http = shared
    body = {"model": "fake", "max_tokens": 5, **messages_call([{"type": kind, kind: 5}], "assistant")}
    http.post("/v1/messages", json=body)
    assert both.engine.calls[-1].body["messages"][-1][field] == "5"


def test_an_unknown_route_names_the_api_document_and_a_wrong_method_the_allowed_ones(shared):
    _, http = shared
    assert "/openapi.json" in refusal(http.get("/v1/nope"), 404, "no_route")
    for path in ("/chat/completions", "/v1/v1/messages", "/sessions/s/responses"):
        assert "the base URL of an OpenAI client ends with /v1" in http.post(path, json={}).json()["error"]["message"]
    reply = http.post("/v1/sessions/x", json={})
    refusal(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "DELETE, GET"


def test_a_directory_that_cannot_be_served_is_refused_before_any_engine_loads_it(shared, tmp_path):
    """tests/unit/proxy/test_checkpoint.py has the defects of a directory."""
    both, http = shared
    cut_off = write_weights(tmp_path / "cut") / "model.safetensors"
    cut_off.write_bytes(cut_off.read_bytes()[:-3])
    wrong = [
        ({"path": str(tmp_path / "nowhere")}, "not a directory"),
        ({"path": str(cut_off.parent)}, "not a whole safetensors file"),
        ({"path": str(write_weights(tmp_path / "weights")), "kind": "lora"}, "adapter_config.json cannot be read"),
    ]
    for body, word in wrong:
        assert word in refusal(http.post("/v1/policies", json=body), 422, "bad_checkpoint")
    assert http.get("/v1/policies").json()["data"] == []
    assert both.engine.state.reloads == []


@pytest.mark.parametrize(
    ("kind", "stream"),
    [*itertools.product((FaultKind.RESET, FaultKind.MALFORMED), (False, True)), (FaultKind.NO_CHOICES, False)],
)
def test_a_call_without_a_valid_engine_reply_gets_an_error_and_is_stored_with_its_outcome(shared, kind, stream):
    both, http = shared
    both.engine.fail_next(Fault(kind=kind, count=2 if kind is FaultKind.RESET else 1))
    session_id = f"{kind}-{stream}"
    reply = http.post(f"/sessions/{session_id}/v1/chat/completions", json={**CHAT, "stream": stream})
    assert "retry" in refusal(reply, 503, "engine_unavailable")
    assert [view.turn.outcome for view in both.proxy.turns(session_id)] == ["error"]


CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}]}
DEADLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT_PATH, {**PLAIN, "prompt_logprobs": 1}, "prompt_logprobs"),
    "chat, none but the prompt's own": (CHAT_PATH, {**PLAIN, "prompt_logprobs": 0}, "prompt_logprobs"),
    "chat, streamed": (CHAT_PATH, {**PLAIN, "prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    "chat, echo": (CHAT_PATH, {**PLAIN, "echo": True}, "echo"),
    "text": (TEXT_PATH, {"prompt": "Hello.", "prompt_logprobs": 1}, "prompt_logprobs"),
}


def test_a_request_that_would_crash_an_engine_with_lora_is_refused(start_proxy):
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
            assert http.post(CHAT_PATH, json={**PLAIN, "echo": False, "prompt_logprobs": None}).status_code == 200


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_the_same_request_is_sent_to_an_engine_without_lora(path, start_proxy):
    with running_fake_engine() as engine:
        proxy = start_proxy(engine.url)
        asked = {"prompt": "Hello."} if path == TEXT_PATH else PLAIN
        assert httpx2.post(proxy.url + path, json={**asked, "prompt_logprobs": 1}).status_code == 200
        assert engine.calls[-1].body["prompt_logprobs"] == 1
