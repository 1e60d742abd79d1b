"""A tool call with broken or cut-off arguments does not end its conversation, in any dialect.

Engines answer 400 to every request whose messages hold arguments that are not JSON. The prompt goes to the engine as
token ids, so the arguments in the messages can be replaced; the stored turn keeps what was sampled.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from support.engines import RunningEngine
from support.proxies import ProxyAndEngine, RunningProxy, StartProxy

from turnwise.fake_engine import Reply, Rule, ToolCall
from turnwise.types import Outcome

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
BROKEN = Reply(tool_calls=[ToolCall(name="look", arguments='{"key": "caf')])


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


DIALECTS = [chat, responses, messages, gemini]


def play_in_session(proxy: RunningProxy, session_id: str, play: Any, *, stream: bool) -> None:
    base_url = f"{proxy.url}/sessions/{session_id}"
    if play is messages:
        client: Any = anthropic.Anthropic(base_url=base_url, api_key="any", max_retries=0)
    elif play is gemini:
        client = genai.Client(api_key="any", http_options=genai.types.HttpOptions(base_url=base_url))
    else:
        client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="any", max_retries=0)
    with client:
        play(client, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("play", DIALECTS)
def test_a_tool_call_with_broken_arguments_does_not_end_its_conversation(
    shared_proxy: ProxyAndEngine, play: Any, *, stream: bool
) -> None:
    """The next turn extends it, and the engine gets no message with arguments that it cannot parse."""
    fake_engine, name = shared_proxy.engine, f"{play.__name__}-{stream}"
    fake_engine.answer(Rule(reply=BROKEN, contains="break", count=1))
    play_in_session(shared_proxy.proxy, name, play, stream=stream)
    turns = [view.turn for view in shared_proxy.proxy.turns(name)]
    assert [(turn.outcome, turn.reason) for turn in turns] == [(Outcome.EXACT, None)] * 2
    assert turns[1].parent_turn_id == turns[0].turn_id
    assert turns[0].response["tool_calls"][0]["function"]["arguments"] == '{"key": "caf'
    sent = fake_engine.calls[-1].body["messages"]
    assert [message["tool_calls"][0]["function"]["arguments"] for message in sent if "tool_calls" in message] == ["{}"]


CUT_OFF = {"tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 8}
"""Forces a call of the tool, and ends it before its JSON is complete."""


@pytest.mark.engine
def test_a_real_engine_continues_after_a_tool_call_that_was_cut_off(
    engine: RunningEngine, start_proxy: StartProxy
) -> None:
    """All dialects, whole and streamed: the second turn repeats the cut-off call, and is on the first one's chain."""
    proxy = start_proxy(engine.url)
    for play in DIALECTS:
        for stream in (False, True):
            name = f"{play.__name__}-{stream}"
            made = {"session_id": name, "sampling": CUT_OFF}
            httpx2.post(f"{proxy.v1}/sessions", json=made).raise_for_status()
            play_in_session(proxy, name, play, stream=stream)
            first, second = (view.turn for view in proxy.turns(name))
            (call,) = first.response["tool_calls"]
            assert not is_json(call["function"]["arguments"]), name
            assert first.finish_reason == "length", name
            assert (first.outcome, second.outcome) == (Outcome.EXACT, Outcome.EXACT), name
            assert (second.parent_turn_id, second.chain_id) == (first.turn_id, first.chain_id), name


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
