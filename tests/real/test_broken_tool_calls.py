"""A tool call with broken or cut-off arguments does not end its conversation, in any dialect.

Messages and Gemini have no calls with partial arguments: their clients get none. Engines answer 400 to every request
whose messages hold arguments that are not JSON. The prompt goes to the engine as token ids, so the arguments in the
messages can be replaced; the stored turn keeps what was sampled.
"""

from typing import Any

import anthropic
import httpx2
import openai
import pytest
from google import genai
from support.proxies import RunningProxy
from turnwise_fake_engine import Reply, Rule, ToolCall

from turnwise.json_text import json_object
from turnwise.types import Outcome

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
GO_ON: Any = {"role": "user", "content": "Go on."}
BROKEN = Reply(tool_calls=[ToolCall(name="look", arguments='{"key": "caf')])


def chat(client: Any, *, stream: bool) -> None:
    """Play two turns in OpenAI's chat format, the second after a broken tool call."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": "break"}]
    asked = {"model": "m", "tools": tools}
    if stream:
        message = joined(client.chat.completions.create(messages=messages, stream=True, **asked))
    else:
        message = client.chat.completions.create(messages=messages, **asked).choices[0].message.model_dump()
    messages.append({field: value for field, value in message.items() if value is not None})
    calls = message["tool_calls"] or []
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "bad arguments"} for call in calls] or [GO_ON]
    client.chat.completions.create(messages=messages, **asked)


def joined(chunks: Any) -> dict[str, Any]:
    """Join a stream with at most one call as agents do; the SDK's own helper refuses a call that is cut off."""
    content = ""
    call: Any = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call["id"] = part.id or call["id"]
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    return {"role": "assistant", "content": content, "tool_calls": [call] if call["id"] else None}


def responses(client: Any, *, stream: bool) -> None:
    asked: Any = {"model": "m", "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
    given: list[Any] = [{"role": "user", "content": "break"}]
    if stream:
        made = list(client.responses.create(input=given, stream=True, **asked))[-1].response
    else:
        made = client.responses.create(input=given, **asked)
    given += [item.model_dump() for item in made.output]
    calls = [item for item in made.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "bad arguments"} for call in calls]
    given += outputs or [GO_ON]
    client.responses.create(input=given, **asked)


def messages(client: Any, *, stream: bool) -> None:
    asked: Any = {"model": "m", "max_tokens": 99, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    given: list[Any] = [{"role": "user", "content": "break"}]
    if stream:
        with client.messages.stream(messages=given, **asked) as events:
            made = events.get_final_message()
    else:
        made = client.messages.create(messages=given, **asked)
    assert not any(block.type == "tool_use" for block in made.content)
    client.messages.create(messages=[*given, {"role": "assistant", "content": made.content}, GO_ON], **asked)


def gemini(client: Any, *, stream: bool) -> None:
    declared = genai.types.FunctionDeclaration(name="look", parameters_json_schema=SCHEMA)
    config = genai.types.GenerateContentConfig(tools=[genai.types.Tool(function_declarations=[declared])])
    session = client.chats.create(model="m", config=config)
    chunks = list(session.send_message_stream("break")) if stream else [session.send_message("break")]
    assert not any(part.function_call for chunk in chunks for part in chunk.candidates[0].content.parts or [])
    session.send_message("Go on.")


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
def test_a_tool_call_with_broken_arguments_does_not_end_its_conversation(shared_proxy, play, *, stream):
    """The next turn extends it, and the engine gets no message with arguments that it cannot parse."""
    fake_engine, name = shared_proxy.engine, f"{play.__name__}-{stream}"
    fake_engine.answer(Rule(reply=BROKEN, contains="break", count=1))
    play_in_session(shared_proxy.proxy, name, play, stream=stream)
    turns = [view.turn for view in shared_proxy.proxy.turns(name)]
    assert [(turn.outcome, turn.reason) for turn in turns] == [(Outcome.EXACT, None)] * 2
    assert turns[1].parent_turn_id == turns[0].turn_id
    assert turns[0].response["tool_calls"][0]["function"]["arguments"] == '{"key": "caf'
    sent = fake_engine.calls[-1].body["messages"]
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in sent if "tool_calls" in message]
    assert arguments == ([] if play in (messages, gemini) else ["{}"])


CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"key": '
SAMPLED = {
    "cut-off": {"structured_outputs": {"regex": CALL + '"[a-z]{400}"'}, "max_tokens": 40},
    "not-json": {"structured_outputs": {"regex": CALL + r"caf\}\}\n</tool_call>"}, "max_tokens": 200},
}
"""Sampling parameters of a session that force broken calls: one is cut off, the other one is complete."""


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["cut-off", pytest.param("not-json", marks=pytest.mark.slow)])
def test_a_real_engine_continues_after_a_broken_tool_call(engine, start_proxy, kind):
    """All dialects, whole and streamed: the second turn repeats the broken call and is on the first one's chain.

    vLLM returns a broken call as text in a whole reply, and as a call with these arguments in a stream.
    """
    proxy = start_proxy(engine.url)
    for play in DIALECTS:
        for stream in (False, True):
            name = f"{kind}-{play.__name__}-{stream}"
            made = {"session_id": name, "sampling": SAMPLED[kind]}
            httpx2.post(f"{proxy.v1}/sessions", json=made).raise_for_status()
            play_in_session(proxy, name, play, stream=stream)
            first, second = (view.turn for view in proxy.turns(name))
            assert (first.outcome, second.outcome) == (Outcome.EXACT, Outcome.EXACT), name
            assert (second.parent_turn_id, second.chain_id) == (first.turn_id, first.chain_id), name
            if stream:
                (call,) = first.response["tool_calls"]
                assert json_object(call["function"]["arguments"]) is None, name
            else:
                assert first.response["content"].startswith("<tool_call>"), name


@pytest.mark.engine
def test_automatic_calling_before_a_real_engine_runs_a_function_only_with_whole_arguments(engine, start_proxy):
    """Google's SDK would run it with its defaults. Limits end the reply before, in and after the arguments."""
    proxy = start_proxy(engine.url)
    ran: list[str] = []

    def look(key: str = "default") -> str:
        """Look a key up."""
        ran.append(key)
        return "found"

    whole = {"structured_outputs": {"regex": CALL + r'"[a-z]{20}"\}\}\n</tool_call>'}}
    once = genai.types.AutomaticFunctionCallingConfig(maximum_remote_calls=2)
    for stream in (False, True):
        ran.clear()
        made = {"session_id": f"automatic-{stream}", "sampling": whole}
        httpx2.post(f"{proxy.v1}/sessions", json=made).raise_for_status()
        options = genai.types.HttpOptions(base_url=f"{proxy.url}/sessions/automatic-{stream}")
        with genai.Client(api_key="any", http_options=options) as client:
            for limit in (4, 12, 20, 28, 36, 200):
                config = genai.types.GenerateContentConfig(
                    tools=[look], max_output_tokens=limit, automatic_function_calling=once
                )
                asked: Any = {"model": "m", "contents": "Look.", "config": config}
                if stream:
                    list(client.models.generate_content_stream(**asked))
                else:
                    client.models.generate_content(**asked)
        assert ran, "no call was sampled to the end"
        assert [len(key) for key in ran] == [20] * len(ran)
        cut = [view.turn for view in proxy.turns(f"automatic-{stream}") if view.turn.finish_reason == "length"]
        assert len(cut) >= 3
