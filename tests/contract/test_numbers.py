"""Numbers keep their value through the proxy: integers of any length, and the spelling of JavaScript's clients."""

import json
from typing import Any

import httpx2
import pytest
from support.proxies import ProxyAndEngine, RunningProxy
from turnwise_fake_engine import Reply, Rule, ToolCall

from turnwise.types import Outcome

LONG = 2**64 + 1
LARGEST = 2**256 - 1
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": LARGEST}}}


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


def chat_body(user: str, arguments: str | None, **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": user}]
    if arguments is not None:
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "c", "content": "ok"}]
    return {"messages": messages, "tools": tools, **more}


def messages_body(user: str, arguments: str | None, **more: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": user}]
    if arguments is not None:
        called = {"type": "tool_use", "id": "c", "name": "look", "input": Text(arguments)}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}
        messages += [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    return {"max_tokens": 500, "messages": messages, "tools": [{"name": "look", "input_schema": SCHEMA}], **more}


def responses_body(user: str, arguments: str | None, **more: Any) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": user}]
    if arguments is not None:
        items += [{"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}]
        items += [{"type": "function_call_output", "call_id": "c", "output": "ok"}]
    return {"input": items, "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}], **more}


def gemini_body(user: str, arguments: str | None, **more: Any) -> dict[str, Any]:
    contents: list[Any] = [{"role": "user", "parts": [{"text": user}]}]
    if arguments is not None:
        contents += [{"role": "model", "parts": [{"functionCall": {"name": "look", "args": Text(arguments)}}]}]
        contents += [{"role": "user", "parts": [{"functionResponse": {"name": "look", "response": {"output": "ok"}}}]}]
    declared = [{"name": "look", "parametersJsonSchema": SCHEMA}]
    config = {field: value for field, value in more.items() if field == "seed"}
    return {"contents": contents, "tools": [{"functionDeclarations": declared}], "generationConfig": config}


class Text(str):
    """JSON that a request contains as it is."""


def encode(body: Any) -> str:
    """Return a request as JSON; the standard library would write each number in Python's way."""
    if isinstance(body, Text):
        return body
    if isinstance(body, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{encode(value)}" for key, value in body.items()) + "}"
    return "[" + ",".join(map(encode, body)) + "]" if isinstance(body, list) else json.dumps(body)


BODIES = {
    "chat/completions": chat_body,
    "messages": messages_body,
    "responses": responses_body,
    "models/fake:generateContent": gemini_body,
    "models/fake:streamGenerateContent?alt=sse": gemini_body,
}


def post(proxy: RunningProxy, session_id: str, route: str, body: dict[str, Any]) -> httpx2.Response:
    sent = encode({"model": "fake", **body})
    made = httpx2.post(f"{proxy.session_v1(session_id)}/{route}", content=sent)
    assert made.status_code == 200, made.text
    return made


@pytest.mark.parametrize("route", BODIES)
def test_a_number_of_another_spelling_extends_the_turn_and_another_number_does_not(
    proxy, shared_engine, session_id, route
):
    """JavaScript writes 5.0 as 5, 1e2 as 100 and -0.0 as 0; 2**64 + 2 is another number than 2**64 + 1."""
    sampled = f'{{"t": 5.0, "more": [1e2, -0.0, 1E+22], "n": {LONG}}}'
    same = f'{{"n":{LONG},"more":[100,0,10000000000000000000000],"t":5}}'
    other = same.replace(str(LONG), str(LONG + 1))
    for arguments, outcome in ((same, "extended"), (other, "new")):
        name = f"{session_id}-{outcome}"
        shared_engine.answer(
            Rule(reply=Reply(tool_calls=[ToolCall(name="look", arguments=sampled)]), contains="call", count=1)
        )
        first = post(proxy, name, route, BODIES[route]("call", None))
        assert str(LONG) in first.text
        post(proxy, name, route, BODIES[route]("call", arguments))
        before, after = (view.turn for view in proxy.turns(name))
        assert before.response["tool_calls"][0]["function"]["arguments"] == sampled
        extended = (after.outcome, after.parent_turn_id, after.reason) == (Outcome.EXACT, before.turn_id, None)
        edited = (after.outcome, after.parent_turn_id, after.reason) == (Outcome.RETOKENISED, None, "edited_history")
        assert (extended, edited) == (outcome == "extended", outcome == "new"), after.reason


@pytest.mark.parametrize("route", BODIES)
def test_the_engine_and_the_store_get_integers_beyond_64_bits_as_they_were_given(
    proxy, shared_engine, session_id, route
):
    """In a tool's input, in a schema, in `seed`, and in what the client reads back."""
    body = BODIES[route]("go on", f'{{"n": {LONG}}}', seed=LONG)
    post(proxy, session_id, route, body)
    sent = shared_engine.calls[-1].body
    assert sent["tools"][0]["function"]["parameters"] == SCHEMA
    assert sent["seed"] == LONG
    (called,) = (message["tool_calls"][0] for message in sent["messages"] if "tool_calls" in message)
    assert json.loads(called["function"]["arguments"]) == {"n": LONG}
    (view,) = proxy.turns(session_id)
    assert view.tools[0]["function"]["parameters"] == SCHEMA
    shown = httpx2.get(f"{proxy.v1}/sessions/{session_id}/turns").raise_for_status()
    assert str(LARGEST) in shown.text
    if route == "messages":
        counted = {field: value for field, value in body.items() if field not in ("max_tokens", "seed")}
        post(proxy, session_id, "messages/count_tokens", counted)


def test_a_call_with_deeply_nested_arguments_is_stored_and_continued(proxy, shared_engine, session_id):
    """A model that repeats itself samples such arguments; no digest can be computed of them as values."""
    sampled = '{"a": ' + "[" * 300 + "]" * 300 + "}"
    shared_engine.answer(
        Rule(reply=Reply(tool_calls=[ToolCall(name="look", arguments=sampled)]), contains="call", count=1)
    )
    post(proxy, session_id, "chat/completions", chat_body("call", None))
    post(proxy, session_id, "chat/completions", chat_body("call", sampled))
    first, second = (view.turn for view in proxy.turns(session_id))
    assert (first.outcome, second.outcome, second.parent_turn_id) == (Outcome.EXACT, Outcome.EXACT, first.turn_id)
