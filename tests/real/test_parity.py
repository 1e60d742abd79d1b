"""A reply through the proxy equals vLLM's own: the same requests to both, at temperature 0.

Only what differs between any two calls is left out: ids and times. Streams are compared by their joined content and by
the keys of their opening, middle, ending and usage chunks, because chunk boundaries depend on timing.

`make test` asks for each shape of a request once, as a whole reply or as a stream; `make test-all` for both.
"""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from support.engines import RunningEngine
from support.proxies import RunningProxy, running_proxy

from turnwise.default_models import trail
from turnwise.types import Outcome

pytestmark = pytest.mark.engine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Follow each boss from kim. Which city?"}
IDS = {"return_token_ids": True}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
TOOLS = {"tools": trail.TOOLS, "max_tokens": 40}
NAMED = {"type": "function", "function": {"name": trail.TOOLS[0]["function"]["name"]}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]}
DRAWN = {"temperature": 1, "seed": 7, "ignore_eos": True}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": NAMED["function"]["name"], "arguments": "{}"}}],
}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


CHAT_SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": said({"role": "system", "content": "Be brief."}, USER),
    "developer": said({"role": "developer", "content": "Be brief."}, USER),
    "two users": said(USER, USER),
    "history": said(USER, {"role": "assistant", "content": "Oslo"}, USER),
    "history that ends with a reply": said(USER, {"role": "assistant", "content": "Oslo"}),
    "prefilled": {
        **said(USER, {"role": "assistant", "content": "It is "}),
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "no generation prompt": {"add_generation_prompt": False},
    "text parts": said({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
    "a name": said({**USER, "name": "kim"}),
    "not ASCII": said({"role": "user", "content": "Où est Łódź? 東京 🙂"}),
    "no content": said({"role": "user", "content": ""}),
    "tool history": {**said(USER, CALLED, {"role": "tool", "tool_call_id": "a", "content": "x"}), **TOOLS},
    "tool history without tools": said(USER, CALLED, {"role": "tool", "tool_call_id": "a", "content": "x"}),
    "a tool's parts": said(
        USER, CALLED, {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}]}
    ),
    "thinking in history": said(USER, {"role": "assistant", "content": "x", "reasoning": "hm"}, USER),
    "max_tokens 1": {"max_tokens": 1},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "min_tokens": {"min_tokens": 5},
    "ignore_eos": {"ignore_eos": True},
    "stop string": {"stop": "e"},
    "stop strings": {"stop": ["zzz", "a"]},
    "stop string kept": {"stop": ["e"], "include_stop_str_in_output": True},
    "stop ids": {"stop_token_ids": list(range(300))},
    "n 1": {"n": 1},
    "n 2, drawn": {"n": 2, **DRAWN},
    "n 3, drawn, with ids": {"n": 3, **DRAWN, **IDS},
    "drawn": DRAWN,
    "drawn, top_p": {**DRAWN, "top_p": 0.5},
    "drawn, top_k": {**DRAWN, "top_k": 3},
    "drawn, min_p": {**DRAWN, "min_p": 0.2},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {"70": 100}},
    "logprobs": {"logprobs": True},
    "logprobs 0": {"logprobs": True, "top_logprobs": 0},
    "logprobs 2": LOGPROBS,
    "logprobs false": {"logprobs": False},
    "logprobs null": {"logprobs": None},
    "token ids": IDS,
    "token ids and logprobs": {**IDS, **LOGPROBS},
    "token ids false": {"return_token_ids": False},
    "logprobs as ids": {**LOGPROBS, "return_tokens_as_token_ids": True},
    "hidden thinking": {"include_reasoning": False},
    "hidden thinking, ids and logprobs": {"include_reasoning": False, **IDS, **LOGPROBS},
    "thinking off": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning effort": {"reasoning_effort": "low"},
    "tools": TOOLS,
    "tools, ids": {**TOOLS, **IDS},
    "tools, logprobs": {**TOOLS, **LOGPROBS},
    "tools, auto": {**TOOLS, "tool_choice": "auto"},
    "tools, none": {**TOOLS, "tool_choice": "none"},
    "tools, required": {**TOOLS, "tool_choice": "required", "max_tokens": 80},
    "tools, named": {**TOOLS, "tool_choice": NAMED, "max_tokens": 80},
    "tools, one at a time": {**TOOLS, "parallel_tool_calls": False},
    "tools, cut": {**TOOLS, "max_tokens": 5},
    "no tools": {"tools": None},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 12},
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 30,
    },
    "text format": {"response_format": {"type": "text"}},
    "a choice of texts": {"structured_outputs": {"choice": ["oslo", "rome"]}},
    "a regex": {"structured_outputs": {"regex": "[ab]{3}"}},
    "metadata and user": {"metadata": {"a": "b"}, "user": "u"},
    "unknown fields": {"no_such_field": 1, "store": True},
    "special tokens kept": {"skip_special_tokens": False, "max_tokens": 30},
    "truncated": {"truncate_prompt_tokens": 4},
    "cache salt": {"cache_salt": "x"},
}
TEXT_SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "default length": {"max_tokens": None},
    "token ids": {"prompt": [40, 41, 42]},
    "two prompts": {"prompt": ["a", "b"]},
    "two prompts of ids": {"prompt": [[40, 41], [42]]},
    "two prompts, twice, drawn": {"prompt": ["a", "b"], "n": 2, **DRAWN},
    "n 2, drawn": {"n": 2, **DRAWN},
    "logprobs 0": {"logprobs": 0},
    "logprobs 2": {"logprobs": 2},
    "logprobs 1, two prompts": {"logprobs": 1, "prompt": ["a", "b"]},
    "ids returned": IDS,
    "ids and logprobs": {**IDS, "logprobs": 1},
    "stop": {"stop": ["e"]},
    "stop ids": {"stop_token_ids": list(range(300))},
    "drawn": DRAWN,
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {"70": 100}},
    "min_tokens": {"min_tokens": 4},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "a regex": {"structured_outputs": {"regex": "[ab]{3}"}},
    "not ASCII": {"prompt": "Où est Łódź? 東京 🙂"},
    "unknown fields": {"user": "u", "no_such_field": 1},
}
STREAM_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
)
SHAPES = [
    *((CHAT, {"messages": [USER]} | shape, name) for name, shape in CHAT_SHAPES.items()),
    *((TEXT, {"prompt": "Hello"} | shape, f"text: {name}") for name, shape in TEXT_SHAPES.items()),
]


def in_every_run(cases: Sequence[Any], ids: Sequence[str], *, one_of: int, first: int = 0) -> list[Any]:
    """Return parameters of which `make test` runs one of so many, from the first one on; the others are slow tests."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=() if place % one_of == first else pytest.mark.slow,
        )
        for place, (case, name) in enumerate(zip(cases, ids, strict=True))
    ]


SHAPE_NAMES = [name for _, _, name in SHAPES]
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no messages": (CHAT, {}),
    "empty messages": (CHAT, {"messages": []}),
    "no role": (CHAT, said({"content": "x"})),
    "too many tokens": (CHAT, {**said(USER), "max_tokens": 99999}),
    "no tokens": (CHAT, {**said(USER), "max_tokens": 0}),
    "too long a prompt": (CHAT, said({"role": "user", "content": "x " * 9000})),
    "too long a prompt, streamed": (CHAT, {**said({"role": "user", "content": "x " * 9000}), "stream": True}),
    "negative temperature": (CHAT, {**said(USER), "temperature": -1}),
    "a temperature of words": (CHAT, {**said(USER), "temperature": "hot"}),
    "greedy choices": (CHAT, {**said(USER), "n": 2, "temperature": 0}),
    "no choices": (CHAT, {**said(USER), "n": 0}),
    "top_p": (CHAT, {**said(USER), "top_p": 2}),
    "top_logprobs alone": (CHAT, {**said(USER), "top_logprobs": 2}),
    "too many logprobs": (CHAT, {**said(USER), "logprobs": True, "top_logprobs": 99}),
    "stream options alone": (CHAT, {**said(USER), "stream_options": {"include_usage": True}}),
    "required without tools": (CHAT, {**said(USER), "tool_choice": "required"}),
    "a tool without a name": (CHAT, {**said(USER), "tools": [{"type": "function", "function": {}}]}),
    "an unknown tool choice": (CHAT, {**said(USER), "tools": trail.TOOLS, "tool_choice": "maybe"}),
    "a broken regex": (CHAT, {**said(USER), "structured_outputs": {"regex": "("}}),
    "another template": (CHAT, {**said(USER), "chat_template": "{{ messages[0].content }}"}),
    "empty tools": (CHAT, {**said(USER), "tools": []}),
    "text: too many tokens": (TEXT, {"prompt": "x", "max_tokens": 99999}),
    "text: too many logprobs": (TEXT, {"prompt": "x", "logprobs": 99}),
    "text: no choices": (TEXT, {"prompt": "x", "n": 0}),
    "text: stream options alone": (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}),
}


@pytest.fixture(scope="module")
def proxy_over_real(engine: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    directory = tmp_path_factory.mktemp("parity")
    with running_proxy(engine.url, f"sqlite:///{directory}/turnwise.db", directory) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def both(engine: RunningEngine, proxy_over_real: RunningProxy) -> Iterator[tuple[httpx2.Client, httpx2.Client]]:
    none_kept = httpx2.Limits(max_keepalive_connections=0)  # vLLM closes connections that idle for 5 s
    with (
        httpx2.Client(base_url=engine.url, trust_env=False, limits=none_kept) as straight,
        httpx2.Client(base_url=proxy_over_real.url, trust_env=False) as through,
    ):
        yield straight, through


SESSIONS = itertools.count()


def ask(
    both: tuple[httpx2.Client, httpx2.Client], path: str, body: dict[str, Any]
) -> tuple[httpx2.Response, httpx2.Response]:
    """Send the same request to both; through the proxy in a new session, so that it extends no turn."""
    straight, through = both
    return straight.post(path, json=body), through.post(f"/sessions/parity-{next(SESSIONS)}{path}", json=body)


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    blank = {"id": "id", "created": 0}
    return {key: blank.get(key, without_ids(each)) if each is not None else None for key, each in value.items()}


def assert_equal(ours: Any, theirs: Any, path: str = "") -> None:
    """Compare JSON; numbers may differ by the rounding of another order of additions."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{path}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, float):
        assert math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-4), (path, ours, theirs)
    else:
        assert type(ours) is type(theirs), (path, ours, theirs)
        assert ours == theirs, path


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert last == "[DONE]"
    return [without_ids(json.loads(event)) for event in events]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a stream: each choice's parts joined, and the last value of every other field."""
    choices: dict[int, dict[str, Any]] = {}
    head: dict[str, Any] = {}
    for chunk in chunks:
        head |= {key: value for key, value in chunk.items() if key not in {"choices", "prompt_token_ids"}}
        for raw in chunk["choices"]:
            choice = choices.setdefault(raw["index"], {"prompt_token_ids": chunk.get("prompt_token_ids")})
            _join(choice, raw)
    return {"head": head, "choices": choices}


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        known = whole.get(key)
        if key == "tool_calls":
            for call in value or ():
                _join(whole.setdefault("tool_calls", {}).setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            whole[key] = known or {}
            _join(whole[key], value)
        elif isinstance(value, list):
            whole[key] = (known or []) + value
        elif isinstance(value, str) and key in {"content", "reasoning", "text", "arguments"}:
            whole[key] = (known or "") + value
        elif value is not None or known is None:
            whole[key] = value


def keys_by_kind(chunks: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the keys of the chunks by kind: opening, middle, ending or usage."""
    places: dict[str, set[str]] = {}
    for chunk in chunks:
        if not chunk["choices"]:
            place, keys = "usage", set(chunk)
        else:
            choice = chunk["choices"][0]
            delta = choice.get("delta") or {}
            opens, ends = "role" in delta, choice["finish_reason"] is not None
            place = "opening" if opens else "ending" if ends else f"middle {sorted(delta)}"
            keys = {*chunk, *(f"choice.{key}" for key in choice), *(f"delta.{key}" for key in delta if not ends)}
        places.setdefault(place, set()).add(" ".join(sorted(keys)))
    return places


@pytest.mark.parametrize(("path", "shape"), in_every_run([shape[:2] for shape in SHAPES], SHAPE_NAMES, one_of=2))
def test_a_reply_through_the_proxy_is_vllms_own(both, path, shape):
    theirs, ours = ask(both, path, {"model": "small", "temperature": 0, "max_tokens": 6, **shape})
    assert theirs.status_code == 200, theirs.text
    assert ours.status_code == 200, ours.text
    assert_equal(without_ids(ours.json()), without_ids(theirs.json()))


@pytest.mark.parametrize(
    ("path", "shape", "options"),
    in_every_run(
        [(path, shape, STREAM_OPTIONS[place % 3]) for place, (path, shape, _) in enumerate(SHAPES)],
        SHAPE_NAMES,
        one_of=2,
        first=1,
    ),
)
def test_a_stream_through_the_proxy_is_vllms_own(both, path, shape, options):
    body = {"model": "small", "temperature": 0, "max_tokens": 6, **shape, "stream": True, **options}
    theirs, ours = ask(both, path, body)
    if theirs.status_code != 200:
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())
        return
    their_chunks, our_chunks = chunks_of(theirs), chunks_of(ours)
    assert_equal(joined(our_chunks), joined(their_chunks))
    their_keys, our_keys = keys_by_kind(their_chunks), keys_by_kind(our_chunks)
    for place in their_keys.keys() | our_keys.keys():
        if not place.startswith("middle") or (place in their_keys and place in our_keys):
            assert our_keys.get(place) == their_keys.get(place), place


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_vllm_refuses_gets_vllms_own_error(both, name):
    path, body = REFUSED[name]
    theirs, ours = ask(both, path, {"model": "small", **body})
    assert theirs.status_code >= 400, theirs.text
    assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json())


DEADLY = {
    "prompt_logprobs, chat": (CHAT, {"prompt_logprobs": 1}),
    "echo, chat": (CHAT, {"echo": True}),
    "prompt_logprobs, text": (TEXT, {"prompt_logprobs": 0}),
}


@pytest.mark.parametrize("name", DEADLY)
def test_a_request_that_would_crash_an_engine_with_adapters_does_not_reach_it(both, name):
    """This vLLM was started with LoRA, which the proxy detects; it still serves the next call."""
    straight, through = both
    path, body = DEADLY[name]
    plain = {"model": "small", "max_tokens": 1, **({"prompt": "a"} if path == TEXT else said(USER))}
    refused = through.post(path, json=plain | body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "engine_has_lora")
    assert through.post(path, json=plain).status_code == straight.post(path, json=plain).status_code == 200


def test_every_call_of_this_module_was_captured(proxy_over_real):
    turns = [view.turn for view in proxy_over_real.turns()]
    assert turns
    assert {turn.outcome for turn in turns} <= {Outcome.EXACT, Outcome.ERROR}
    assert all(len(turn.logprobs) == len(turn.token_ids) > 0 for turn in turns if turn.outcome is Outcome.EXACT)
