"""Turns that violate the assumptions of training are untrainable with a reason; clients cannot control the engine."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from support.proxies import ProxyAndEngine, RunningProxy

from turnwise.fake_engine import Reply, Rule, RunningFakeEngine, ToolCall
from turnwise.types import Outcome

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
BROKEN = Reply(tool_calls=[ToolCall(name="look", arguments='{"key": "caf')])
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


@pytest.fixture
def engine(shared_proxy: ProxyAndEngine) -> Iterator[RunningFakeEngine]:
    yield shared_proxy.engine
    shared_proxy.engine.state.script.rules.clear()


@pytest.fixture
def session_id() -> str:
    return uuid.uuid4().hex


def ask(proxy: RunningProxy, session_id: str, **fields: Any) -> httpx2.Response:
    asked = {"messages": [{"role": "user", "content": "Hello there"}], **fields}
    reply = httpx2.post(f"{proxy.session_v1(session_id)}/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_reply_that_the_engine_cut_off_is_untrainable(
    proxy: RunningProxy, engine: RunningFakeEngine, session_id: str, reason: Any, *, stream: bool
) -> None:
    engine.answer(Rule(reply=Reply(text="One two", finish_reason=reason)))
    ask(proxy, session_id, stream=stream)
    (view,) = proxy.turns(session_id)
    assert (view.turn.outcome, view.turn.reason) == (Outcome.UNTRAINABLE, f"engine_{reason}")


def test_beam_search_and_media_are_untrainable(proxy: RunningProxy, engine: RunningFakeEngine, session_id: str) -> None:
    assert engine.url
    ask(proxy, session_id, use_beam_search=True)
    ask(proxy, session_id, messages=[{"role": "user", "content": [{"type": "text", "text": "Look."}, PICTURE]}])
    ask(proxy, session_id)
    ended = [(view.turn.outcome, view.turn.reason) for view in proxy.turns(session_id)]
    assert ended == [(Outcome.UNTRAINABLE, "beam_search"), (Outcome.UNTRAINABLE, "media"), (Outcome.EXACT, None)]


def test_fields_that_control_the_engine_are_removed_and_counted(
    proxy: RunningProxy, engine: RunningFakeEngine, session_id: str
) -> None:
    """This covers calls and the sampling parameters of a session."""
    steering = {"kv_transfer_params": {"prompt_token_ids": [1]}, "vllm_xargs": {"a": 1}, "priority": -5}
    pinned = {"session_id": session_id, "sampling": {"vllm_xargs": {"b": 1}, "min_p": 0.5}}
    httpx2.post(f"{proxy.v1}/sessions", json=pinned).raise_for_status()
    ask(proxy, session_id, **steering, top_k=3)
    sent = engine.calls[-1].body
    assert not steering.keys() & sent.keys()
    assert (sent["top_k"], sent["min_p"]) == (3, 0.5)
    httpx2.post(f"{proxy.v1}/completions", json={"prompt": "x", "max_tokens": 1, **steering}).raise_for_status()
    assert not steering.keys() & engine.calls[-1].body.keys()
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    assert 'turnwise_dropped_fields_total{field="kv_transfer_params"} 2.0' in metrics


def chat(client: Any, *, stream: bool) -> None:
    """Play two turns in OpenAI's chat format, the second after a broken tool call."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "break"}]
    asked = {"model": "m", "tools": tools}
    if stream:
        with client.chat.completions.stream(messages=messages, **asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(messages=messages, **asked).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "bad arguments"})
    client.chat.completions.create(messages=messages, **asked)


def responses(client: Any, *, stream: bool) -> None:
    """The same in OpenAI's Responses."""
    asked: Any = {"model": "m", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
    given: list[Any] = [{"role": "user", "content": "break"}]
    if stream:
        made = list(client.responses.create(input=given, stream=True, **asked))[-1].response
    else:
        made = client.responses.create(input=given, **asked)
    given += [item.model_dump() for item in made.output]
    given.append({"type": "function_call_output", "call_id": made.output[-1].call_id, "output": "bad arguments"})
    client.responses.create(input=given, **asked)


def messages(client: Any, *, stream: bool) -> None:
    """The same in Anthropic's Messages."""
    asked: Any = {"model": "m", "max_tokens": 99, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    given: list[Any] = [{"role": "user", "content": "break"}]
    if stream:
        with client.messages.stream(messages=given, **asked) as events:
            made = events.get_final_message()
    else:
        made = client.messages.create(messages=given, **asked)
    assert made.content[-1].input == {}
    result = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": "bad arguments", "is_error": True}
    given += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    client.messages.create(messages=given, **asked)


def gemini(client: Any, *, stream: bool) -> None:
    """The same in Google's format."""
    declared = genai.types.FunctionDeclaration(name="look", parameters_json_schema=SCHEMA)
    config = genai.types.GenerateContentConfig(tools=[genai.types.Tool(function_declarations=[declared])])
    session = client.chats.create(model="m", config=config)
    chunks = list(session.send_message_stream("break")) if stream else [session.send_message("break")]
    call = next(part.function_call for part in chunks[-1].candidates[0].content.parts if part.function_call)
    response = genai.types.FunctionResponse(id=call.id, name=call.name, response={"error": "bad arguments"})
    session.send_message(genai.types.Part(function_response=response))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", [chat, responses, messages, gemini])
def test_a_tool_call_with_broken_arguments_does_not_end_its_conversation(
    proxy: RunningProxy, engine: RunningFakeEngine, session_id: str, play: Any, *, stream: bool
) -> None:
    """The next turn extends it, and the engine gets no message with arguments that it cannot parse."""
    engine.answer(Rule(reply=BROKEN, contains="break", count=1))
    base_url = f"{proxy.url}/sessions/{session_id}"
    if play is messages:
        client: Any = anthropic.Anthropic(base_url=base_url, api_key="any", max_retries=0)
    elif play is gemini:
        client = genai.Client(api_key="any", http_options=genai.types.HttpOptions(base_url=base_url))
    else:
        client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=0)
    with client:
        play(client, stream=stream)
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [(turn.outcome, turn.reason) for turn in turns] == [(Outcome.EXACT, None)] * 2
    assert turns[1].parent_turn_id == turns[0].turn_id
    assert turns[0].response["tool_calls"][0]["function"]["arguments"] == '{"key": "caf'
    sent = engine.calls[-1].body["messages"]
    assert [message["tool_calls"][0]["function"]["arguments"] for message in sent if "tool_calls" in message] == ["{}"]
