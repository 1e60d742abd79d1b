"""Messages and Responses through a real proxy: what clients read, what is stored, and that turns extend each other."""

import json
import uuid
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from support.proxies import ProxyAndEngine, RunningProxy, assert_served_is_stored
from turnwise_fake_engine import Reply, Rule, ToolCall

from turnwise.types import Outcome

SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string"}},
    "required": ["key"],
    "additionalProperties": False,
}
MESSAGES_TOOL: Any = {"name": "look", "description": "Look it up.", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", "name": "look", "description": "Look it up.", "parameters": SCHEMA}
RESPONSES_TOOL |= {"strict": True}
THINKING = Reply(
    reasoning="two and two", text="Four, and then.", tool_calls=[ToolCall(name="look", arguments={"key": "é"})]
)


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


def messages_client(proxy: RunningProxy, session_id: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"{proxy.url}/sessions/{session_id}", api_key="any", max_retries=0)


def responses_client(proxy: RunningProxy, session_id: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.session_v1(session_id), api_key="any", max_retries=0)


def message(client: anthropic.Anthropic, *, stream: bool, **asked: Any) -> anthropic.types.Message:
    asked = {"model": "fake", "max_tokens": 200, **asked}
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


def response(client: openai.OpenAI, *, stream: bool, **asked: Any) -> Any:
    asked = {"model": "fake", **asked}
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        last: Any = list(events)[-1]
    assert last.type in {"response.completed", "response.incomplete"}
    return last.response


def one_exact_chain(proxy: RunningProxy, session_id: str, num_turns: int) -> bool:
    turns = [view.turn for view in proxy.turns(session_id)]
    return (
        len(turns) == num_turns
        and {turn.outcome for turn in turns} == {Outcome.EXACT}
        and len({turn.chain_id for turn in turns}) == 1
    )


@pytest.mark.parametrize("stream", [False, True])
def test_an_anthropic_agent_with_tools_and_thinking_is_one_exact_chain(proxy, shared_engine, session_id, *, stream):
    shared_engine.answer(Rule(reply=THINKING, contains="first", count=1))
    client, tools = messages_client(proxy, session_id), [MESSAGES_TOOL]
    asked: list[Any] = [{"role": "user", "content": "first"}]
    first = message(client, stream=stream, system="Be kind.", messages=asked, tools=tools)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    thought, answer, call = first.content
    assert (thought.thinking, answer.text, call.input) == ("two and two", "Four, and then.", {"key": "é"})
    assert first.stop_reason == "tool_use"
    asked += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"}]},
    ]
    second = message(client, stream=not stream, system="Be kind.", messages=asked, tools=tools)
    asked += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "and now?"}]
    third = message(client, stream=stream, system="Be kind.", messages=asked, tools=tools)
    assert [turn.turn.turn_id for turn in proxy.turns(session_id)] == [first.id, second.id, third.id]
    assert one_exact_chain(proxy, session_id, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_agent_that_repeats_its_items_is_one_exact_chain(proxy, shared_engine, session_id, *, stream):
    shared_engine.answer(Rule(reply=THINKING, contains="first", count=1))
    client = responses_client(proxy, session_id)
    asked: list[Any] = [{"role": "user", "content": "first"}]
    fixed: Any = {"instructions": "Be kind.", "tools": [RESPONSES_TOOL]}
    first = response(client, stream=stream, input=asked, **fixed)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output_text == "Four, and then."
    asked += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    asked.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "ok"})
    second = response(client, stream=not stream, input=asked, **fixed)
    asked += [*(item.model_dump() for item in second.output), {"role": "user", "content": "and now?"}]
    third = response(client, stream=stream, input=asked, **fixed)
    assert [turn.turn.turn_id for turn in proxy.turns(session_id)] == [first.id, second.id, third.id]
    assert one_exact_chain(proxy, session_id, 3)


def test_a_previous_response_is_found_in_the_store_and_in_its_session(proxy, shared_engine):
    assert shared_engine.url
    client = openai.OpenAI(base_url=proxy.v1, api_key=uuid.uuid4().hex, max_retries=0)
    first = client.responses.create(model="fake", input="one", instructions="Be kind.")
    second = client.responses.create(model="fake", input="two", instructions="Be kind.", previous_response_id=first.id)
    third = client.responses.create(
        model="fake", input="three", instructions="Be kind.", previous_response_id=second.id
    )
    (session_id,) = {view.turn.session_id for view in proxy.turns() if view.turn.turn_id in {first.id, third.id}}
    assert one_exact_chain(proxy, session_id, 3)
    last = proxy.turns(session_id)[-1]
    assert [each["role"] for each in last.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.create(model="fake", input="two", previous_response_id="resp_nothing")


def test_new_instructions_replace_those_of_the_previous_response(proxy, shared_engine, session_id):
    """OpenAI's rule; the new chain names this as its reason."""
    assert shared_engine.url
    client = responses_client(proxy, session_id)
    first = client.responses.create(model="fake", input="one", instructions="Be kind.")
    client.responses.create(model="fake", input="two", instructions="Be brief.", previous_response_id=first.id)
    second = proxy.turns(session_id)[-1]
    assert second.messages[0] == {"role": "system", "content": "Be brief."}
    assert [each["content"] for each in second.messages[1:]] == ["one", "one", "two"]
    assert second.turn.reason == "system_changed"


def test_a_schema_and_logprobs_are_translated_from_the_dialects_fields(proxy, shared_engine, session_id):
    """`text.format` becomes the engine's response format; logprobs come only where they were included."""
    client = responses_client(proxy, session_id)
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    made = client.responses.create(
        model="fake", input="a", text=wanted, include=["message.output_text.logprobs"], top_logprobs=2
    )
    sent = shared_engine.calls[-1].body
    assert sent["response_format"]["json_schema"] == {"name": "x", "schema": SCHEMA, "strict": True}
    shown = made.output[0].content[0]
    assert "".join(each.token for each in shown.logprobs) == shown.text
    assert len(shown.logprobs) == made.usage.output_tokens - 1  # the end of the turn is no text
    plain = client.responses.create(model="fake", input="a")
    assert plain.output[0].content[0].logprobs == []


def test_the_token_count_of_a_continued_chain_equals_the_prompt_tokens_of_the_call(proxy, shared_engine, session_id):
    """The sampled arguments have no spaces, and rendering them again would add some. A count creates no session."""
    client = messages_client(proxy, session_id)
    call = ToolCall(name="look", arguments='{"key":"a","more":[1,2,3]}')
    shared_engine.answer(Rule(reply=Reply(tool_calls=[call]), count=1))
    asked: Any = {"tools": [MESSAGES_TOOL], "messages": [{"role": "user", "content": "Hi."}]}
    counted = client.messages.count_tokens(model="fake", **asked)
    with pytest.raises(httpx2.HTTPStatusError):
        httpx2.get(f"{proxy.v1}/sessions/{session_id}").raise_for_status()
    first = message(client, stream=False, **asked)
    assert counted.input_tokens == first.usage.input_tokens
    block = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "b"}
    asked["messages"] += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    counted = client.messages.count_tokens(model="fake", **asked)
    second = message(client, stream=False, **asked)
    assert counted.input_tokens == second.usage.input_tokens
    assert one_exact_chain(proxy, session_id, 2)


def test_anthropics_hosted_tools_are_dropped_and_the_count_respects_disabled_thinking(proxy, shared_engine, session_id):
    """A count renders with the same template arguments as the call."""
    asked: Any = {
        "model": "claude-x",
        "messages": [{"role": "user", "content": "Hi."}, {"role": "system", "content": "Be brief."}],
        "thinking": {"type": "disabled"},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, MESSAGES_TOOL],
    }
    client = messages_client(proxy, session_id)
    raw = client.messages.with_raw_response.create(max_tokens=9, extra_headers={"anthropic-beta": "x"}, **asked)
    assert raw.headers["x-turnwise-dropped-tools"] == "web_search"
    sent = shared_engine.calls[-1].body
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["look"]
    assert [message["role"] for message in sent["messages"]] == ["user", "system"]
    assert client.messages.count_tokens(**asked).input_tokens == raw.parse().usage.input_tokens


GEMINI_HELLO = {"contents": [{"parts": [{"text": "Hi."}]}]}
ASKED_TWICE: dict[str, tuple[dict[str, Any], str]] = {
    "chat/completions": ({"messages": [{"role": "user", "content": "Hi."}]}, '"content":"Hi."'),
    "completions": ({"prompt": "Hi.", "max_tokens": 3}, '"text":"Hi."'),
    "messages": ({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}]}, '"text":"Hi."'),
    "responses": ({"input": "Hi."}, '"text":"Hi."'),
    "models/fake:generateContent": (GEMINI_HELLO, '"text":"Hi."'),
    "models/fake:streamGenerateContent": (GEMINI_HELLO, '"text":"Hi."'),
}


def test_a_replayed_answer_that_is_no_longer_in_memory_is_read_from_the_store_in_each_dialect(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url, "--cache-bytes", "0")
    fake_engine.calls.clear()
    for route, (body, answer) in ASKED_TWICE.items():
        for stream in (False, True):
            headers = {"idempotency-key": f"{route}-{stream}"}
            ask = {"model": "fake", "stream": stream, **body}
            first, second = (
                httpx2.post(f"{proxy.session_v1('twice')}/{route}", json=ask, headers=headers) for _ in range(2)
            )
            turn_id = proxy.turns("twice")[-1].turn.turn_id
            assert turn_id in first.text
            assert turn_id in second.text
            assert answer in second.text, second.text
            if not stream and "models" not in route:
                assert second.json().keys() <= first.json().keys()
    assert len(fake_engine.calls) == 2 * len(ASKED_TWICE)
    assert_served_is_stored(proxy, fake_engine)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_replayed_answer_that_is_read_from_the_store_has_the_ids_and_logprobs_that_were_asked_for(
    start_proxy, fake_engine, route, stream
):
    """Of a call that extends another one too: its prompt is the whole one. A stream's tokens come in one chunk."""
    proxy = start_proxy(fake_engine.url, "--cache-bytes", "0")
    body, _ = ASKED_TWICE[route]
    if "messages" in body:
        reply = httpx2.post(f"{proxy.session_v1('s')}/{route}", json={"model": "fake", **body}).json()
        more = [reply["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        body = {"messages": [*body["messages"], *more]}
    logprobs = {"logprobs": True} if "messages" in body else {"logprobs": 0}
    ask = {"model": "fake", "n": 2, "stream": stream, "return_token_ids": True, **logprobs, **body}
    headers = {"idempotency-key": "k"}
    fake_engine.calls.clear()
    first, second = (
        httpx2.post(f"{proxy.session_v1('s')}/{route}", json=ask, headers=headers).raise_for_status() for _ in range(2)
    )
    assert len(fake_engine.calls) == 1
    assert shown_tokens(second, stream=stream) == shown_tokens(first, stream=stream)


def shown_tokens(answer: httpx2.Response, *, stream: bool) -> dict[str, list[Any]]:
    """Return the ids in an answer: of the prompt, by where they are, and of each choice; and each choice's logprobs."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines] if stream else [answer.json()]
    ids: dict[str, list[Any]] = {}
    for chunk in chunks:
        for name, part in (("", chunk), *((str(choice["index"]), choice) for choice in chunk["choices"])):
            if part.get("prompt_token_ids"):
                ids[f"prompt {name}"] = part["prompt_token_ids"]
            if part.get("token_ids"):
                ids[name] = ids.get(name, []) + part["token_ids"]
                for field, values in part["logprobs"].items():
                    rounded = json.loads(json.dumps(values), parse_float=lambda text: round(float(text), 5))
                    ids[f"{field} {name}"] = ids.get(f"{field} {name}", []) + rounded
    return ids
