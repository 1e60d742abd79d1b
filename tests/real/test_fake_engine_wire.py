"""The fake engine's wire format is vLLM's: the same calls to both, compared key by key and type by type.

Their texts differ, so a reply is reduced to its shape: for each path the types seen, and whether the key was always
present. The fake's script repeats the real engine's reply, so that both replies have the same parts.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.engines import RunningEngine, running_engine
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, Script, ToolCall, running_fake_engine

from turnwise.default_models import trail
from turnwise.sampling import ENFORCE_STRICT_TOOLS

pytestmark = pytest.mark.engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Follow each boss from kim. Which city?"}]
NAMED = {"type": "function", "function": {"name": "lookup"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": trail.TOOLS[0]["function"]["parameters"]}}
IDS = {"return_token_ids": True}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}

CHAT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "token ids": IDS,
    "logprobs": LOGPROBS,
    "everything": {**IDS, **LOGPROBS, "n": 2, "temperature": 1, "ignore_eos": True},
    "stop string": {**IDS, "stop": ["name"]},
    "tools, auto": {**IDS, "tools": trail.TOOLS, "max_tokens": 40},
    "tools, auto, no ids": {"tools": trail.TOOLS, "max_tokens": 40},
    "tools, required": {**IDS, **LOGPROBS, "tools": trail.TOOLS, "tool_choice": "required", "max_tokens": 80},
    "tools, named": {**IDS, "tools": trail.TOOLS, "tool_choice": NAMED, "max_tokens": 80},
    "tools, none": {**IDS, "tools": trail.TOOLS, "tool_choice": "none"},
    "tools, cut": {**IDS, "tools": trail.TOOLS, "max_tokens": 3},
    "json schema": {**IDS, "response_format": SCHEMA, "max_tokens": 60},
    "prompt ids": {**IDS, "kv_transfer_params": {"prompt_token_ids": [40, 41, 42]}},
    "hidden reasoning": {**IDS, **LOGPROBS, "include_reasoning": False},
    "unknown field": {"no_such_field": 1},
}
STREAM_OPTIONS: dict[str, dict[str, Any]] = {
    "no usage": {},
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
TEXT_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ids and logprobs": {**IDS, "logprobs": 2},
    "echo": {"echo": True, "logprobs": 0},
    "n": {"n": 2, "temperature": 1, "ignore_eos": True},
    "token ids": {"prompt": [40, 41], **IDS},
    "two prompts": {"prompt": ["a", "b"]},
    "tokens by id": {"logprobs": 1, "logprob_token_ids": [70, 71], "return_tokens_as_token_ids": True, "max_tokens": 1},
}
REFUSED: dict[str, tuple[str, Any]] = {
    "broken JSON": (CHAT, b"{"),
    "no messages": (CHAT, {"model": "small"}),
    "empty messages": (CHAT, {"messages": []}),
    "unknown model": (CHAT, {"messages": ASK, "model": "x"}),
    "unknown model, streamed": (CHAT, {"messages": ASK, "model": "x", "stream": True}),
    "no room": (CHAT, {"messages": ASK, "max_tokens": 99999}),
    "nothing to sample": (CHAT, {"messages": ASK, "max_tokens": 0}),
    "too long a prompt": (CHAT, {"messages": [{"role": "user", "content": "x" * 40_000}]}),
    "negative temperature": (CHAT, {"messages": ASK, "temperature": -1}),
    "greedy choices": (CHAT, {"messages": ASK, "n": 2, "temperature": 0}),
    "no choices": (CHAT, {"messages": ASK, "n": 0}),
    "top_logprobs alone": (CHAT, {"messages": ASK, "top_logprobs": 2}),
    "too many logprobs": (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 99}),
    "stream options alone": (CHAT, {"messages": ASK, "stream_options": {"include_usage": True}}),
    "required without tools": (CHAT, {"messages": ASK, "tool_choice": "required"}),
    "no prompt": (TEXT, {"model": "small"}),
    "empty prompt": (TEXT, {"prompt": ""}),
    "tokenize, unknown model": ("/tokenize", {"prompt": "a", "model": "x"}),
    "rpc without a method": ("/collective_rpc", {}),
    "rpc of no method": ("/collective_rpc", {"method": "nothing"}),
    "adapter without a path": ("/v1/load_lora_adapter", {}),
    "no version": ("/update_weight_version", {}),
    "unknown adapter": ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    "adapter that is not there": ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
}
CONTROL: dict[str, tuple[str, str, Any]] = {
    "models": ("GET", "/v1/models", None),
    "version": ("GET", "/version", None),
    "tokenize messages": ("POST", "/tokenize", {"messages": ASK, "tools": trail.TOOLS}),
    "tokenize prompt": ("POST", "/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    "detokenize": ("POST", "/detokenize", {"tokens": [40, 41]}),
    "pause": ("POST", "/pause?mode=keep", {}),
    "is paused": ("GET", "/is_paused", None),
    "update version": ("POST", "/update_weight_version", {"new_version": "7"}),
    "weight info": ("GET", "/weight_info", None),
    "resume": ("POST", "/resume", {}),
    "no such route": ("GET", "/no/such/route", None),
    "wrong method": ("GET", CHAT, None),
}

Shape = dict[str, tuple[frozenset[str], bool]]
"""For each path, the types seen and whether the key was always present."""


@pytest.fixture(scope="module")
def engine(small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with running_engine(small_model_dir, log, environment={ENFORCE_STRICT_TOOLS: "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def real(engine: RunningEngine) -> Iterator[httpx2.Client]:
    none_kept = httpx2.Limits(max_keepalive_connections=0)  # vLLM closes connections that idle for 5 s
    with httpx2.Client(base_url=engine.url, trust_env=False, limits=none_kept) as client:
        yield client


@pytest.fixture(scope="module")
def fake_running() -> Iterator[RunningFakeEngine]:
    with running_fake_engine(Script(model="small", max_model_len=2048, lora=True)) as running:
        yield running


@pytest.fixture
def fake(fake_running: RunningFakeEngine) -> Iterator[httpx2.Client]:
    fake_running.state.script.rules.clear()
    with httpx2.Client(base_url=fake_running.url, trust_env=False) as client:
        yield client


def _kind(value: Any) -> str:
    return "null" if value is None else "number" if type(value) in {int, float} else type(value).__name__


def _observe(value: Any, path: str, seen: dict[str, list[str]], parents: dict[str, int]) -> None:
    seen.setdefault(path, []).append(_kind(value))
    if isinstance(value, dict):
        parents[path] = parents.get(path, 0) + 1
        # These are keyed by tokens, which differ.
        by_token = path.endswith(("top_logprobs[]", "prompt_logprobs[]"))
        items = [("*", next(iter(value.values())))] if by_token and value else value.items()
        for key, inner in items:
            _observe(inner, f"{path}.{key}", seen, parents)
    elif isinstance(value, list):
        for inner in value:
            _observe(inner, f"{path}[]", seen, parents)


def _shape(values: list[Any]) -> Shape:
    seen: dict[str, list[str]] = {}
    parents: dict[str, int] = {}
    for value in values:
        _observe(value, "", seen, parents)
    shape: Shape = {}
    for path, kinds in seen.items():
        parent = path.rpartition(".")[0]
        shape[path] = (frozenset(kinds), path.endswith("[]") or len(kinds) == parents.get(parent, len(kinds)))
    return shape


def _chunks(response: httpx2.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def _by_kind(chunks: list[dict[str, Any]]) -> dict[str, Shape]:
    """Group a stream's chunks by their purpose, and return the shape of each group.

    The part of a message in a chunk depends on where tokens end and on how many are sent at once. So all deltas form
    one group, whichever chunks they are in, and middle and ending chunks are compared without their deltas.
    """
    places: dict[str, list[Any]] = {"opening": [], "rest": [], "usage": [], "deltas": []}
    for chunk in chunks:
        if not chunk["choices"]:
            places["usage"].append(chunk)
        elif "role" in chunk["choices"][0].get("delta", {}):
            places["opening"].append(chunk)
        else:
            delta = chunk["choices"][0].pop("delta", {})
            places["deltas"] += [{**delta, "tool_calls": [call]} for call in delta.get("tool_calls", [])]
            places["deltas"] += [delta] if delta and "tool_calls" not in delta else []
            ended = chunk["choices"][0]["finish_reason"] is not None
            places["ending" if ended else "rest"] = [*places.get("ending" if ended else "rest", []), chunk]
    shapes = {place: _shape(found) for place, found in places.items() if found}
    if "deltas" in shapes:
        shapes["deltas"] = {path: (kinds, True) for path, (kinds, _) in shapes["deltas"].items()}
    return shapes


def _script_the_reply_of(fake_running: RunningFakeEngine, reply: dict[str, Any]) -> None:
    """Script the fake engine with the real engine's plain reply to the same call."""
    replies = []
    for choice in reply["choices"]:
        message = choice["message"]
        calls = [
            ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls", [])
        ]
        cut = "length" if choice["finish_reason"] == "length" else "stop"
        text = (message["content"] or "") + str(choice["stop_reason"] or "")
        if not text and not calls and cut == "length":
            text = "x"  # tokens of a call that was cut off: the tool parser holds their text back
        replies.append(Reply(text=text, tool_calls=calls, finish_reason=cut))
    fake_running.answer(Rule(reply=replies[0].model_copy(update={"choices": replies[1:]})))


def _with_token_limit(case: dict[str, Any]) -> dict[str, Any]:
    """Return the fake's call: a byte a token needs more of them, but for a cut, which is a tool call's start."""
    return {**case, "max_tokens": 40 if case.get("max_tokens") == 3 else 2000}


@pytest.mark.parametrize("name", CHAT_CASES)
def test_a_plain_chat_reply_has_vllms_shape(name, real, fake, fake_running):
    case = {"model": "small", "messages": ASK, "temperature": 0, "max_tokens": 6, **CHAT_CASES[name]}
    theirs = real.post(CHAT, json=case).raise_for_status().json()
    if name == "tools, auto":
        assert theirs["choices"][0]["message"]["tool_calls"], "the small model does not call its tool any more"
    if name != "tools, cut":
        _script_the_reply_of(fake_running, theirs)
    ours = fake.post(CHAT, json=_with_token_limit(case)).raise_for_status().json()
    assert _shape([ours]) == _shape([theirs])
    reasons = [(each["finish_reason"], type(each["stop_reason"])) for each in theirs["choices"]]
    assert [(each["finish_reason"], type(each["stop_reason"])) for each in ours["choices"]] == reasons


@pytest.mark.parametrize(
    ("name", "usage"),
    [
        pytest.param(name, usage, marks=() if (place + number) % 3 == 0 else pytest.mark.slow)
        for place, name in enumerate(CHAT_CASES)
        for number, usage in enumerate(STREAM_OPTIONS)
    ],
)
def test_a_streamed_chat_reply_has_vllms_chunks(name, usage, real, fake, fake_running):
    case = {"model": "small", "messages": ASK, "temperature": 0, "max_tokens": 6, **CHAT_CASES[name]}
    plain = real.post(CHAT, json=case).raise_for_status().json()
    if name != "tools, cut":
        _script_the_reply_of(fake_running, plain)
    streamed = {"stream": True, **STREAM_OPTIONS[usage]}
    theirs = _chunks(real.post(CHAT, json={**case, **streamed}))
    ours = _chunks(fake.post(CHAT, json={**_with_token_limit(case), **streamed}))
    reasons = [[each["finish_reason"] for chunk in chunks for each in chunk["choices"]] for chunks in (theirs, ours)]
    assert {*filter(None, reasons[1])} == {*filter(None, reasons[0])}
    shapes = _by_kind(ours), _by_kind(theirs)
    if "rest" not in shapes[1]:
        # The real engine sent all of its few tokens at once.
        shapes[0].pop("rest", None)
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("name", TEXT_CASES)
def test_a_text_completion_has_vllms_shape(name, streamed, real, fake):
    case = {"model": "small", "prompt": "Hello", "temperature": 0, "max_tokens": 4, **TEXT_CASES[name]}
    case |= {"ignore_eos": True, "stream": streamed} if streamed else {}
    ours = fake.post(TEXT, json=case)
    if streamed:
        theirs = _in_as_many_chunks(real, case, len(_chunks(ours)))
        assert _by_kind(_chunks(ours)) == _by_kind(theirs)
    else:
        assert _shape([ours.json()]) == _shape([real.post(TEXT, json=case).json()])


def _in_as_many_chunks(real: httpx2.Client, case: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
    """Repeat the call until each token has its own chunk: a busy vLLM puts several tokens into one chunk."""
    for _ in range(50):
        streamed = _chunks(real.post(TEXT, json=case))
        if len(streamed) == chunks:
            break
    return streamed


def test_prompt_logprobs_have_vllms_shape(real, fake):
    """Only plain replies contain them."""
    case = {"model": "small", "prompt": "Hello", "max_tokens": 1, "prompt_logprobs": 1}
    theirs, ours = (http.post(TEXT, json=case).raise_for_status().json() for http in (real, fake))
    assert _shape([ours]) == _shape([theirs])


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_vllm_refuses_are_refused_with_the_same_status_type_and_parameter(name, real, fake):
    path, body = REFUSED[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    theirs, ours = (http.post(path, content=content, headers=headers) for http in (real, fake))
    assert ours.status_code == theirs.status_code, (ours.text, theirs.text)
    for field in ("type", "code"):
        assert ours.json()["error"][field] == theirs.json()["error"][field], (ours.text, theirs.text)
    assert ours.json()["error"].keys() == theirs.json()["error"].keys()
    assert (ours.json()["error"]["param"] is None) == (theirs.json()["error"]["param"] is None), theirs.text


@pytest.mark.parametrize("name", CONTROL)
def test_a_control_route_answers_in_vllms_shape(name, real, fake):
    method, path, body = CONTROL[name]
    theirs, ours = (http.request(method, path, json=body) for http in (real, fake))
    assert ours.status_code == theirs.status_code, ours.text
    assert _shape([ours.json()]) == _shape([theirs.json()])
