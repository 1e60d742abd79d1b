"""openai-python through the proxy: its helpers parse, accumulate and retry as they do with OpenAI's own server."""

from typing import Any

import httpx2
import openai
import pydantic
import pytest
from support.proxies import RunningProxy

USER: Any = {"role": "user", "content": "Hello there"}
TOOL: Any = openai.pydantic_function_tool
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class City(pydantic.BaseModel):
    """A schema that a reply is parsed by."""

    name: str
    size: int


class Look(pydantic.BaseModel):
    """Look a key up."""

    key: str


@pytest.fixture
def client(proxy: RunningProxy) -> openai.OpenAI:
    return openai.OpenAI(base_url=proxy.v1, api_key="any", max_retries=0)


def test_chat_completions_stream_helper_and_its_final_completion(client):
    with client.chat.completions.stream(model="fake", messages=[USER], tools=[TOOL(Look)]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert isinstance(calls[0].function.parsed_arguments, Look)


def test_chat_completions_parse(client):
    parsed = client.chat.completions.parse(model="fake", messages=[USER], response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    with client.chat.completions.stream(model="fake", messages=[USER], response_format=City) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_responses_create_stream_and_parse(client):
    made = client.responses.create(model="fake", input="Hello there")
    assert made.output_text == "Hello there"
    with client.responses.stream(model="fake", input="Hello there") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert (text, stream.get_final_response().output_text) == ("Hello there", "Hello there")
    parsed = client.responses.parse(model="fake", input="Hello there", text_format=City)
    assert isinstance(parsed.output_parsed, City)
    raw = client.responses.with_raw_response.create(model="fake", input="Hello there")
    assert raw.parse().output_text == "Hello there"


def test_a_conversation_names_its_session_and_continues_from_its_newest_response(client, proxy, fake_engine):
    """Also after its session is over, which the application does not know."""
    conversation: Any = {"id": "conv_kim"}
    ask = client.responses.create
    first = ask(model="fake", input="One", conversation="conv_kim")
    assert first.conversation.id == "conv_kim"
    ask(model="fake", input="Elsewhere", conversation="conv_ann")
    with client.responses.stream(model="fake", input="Two", conversation=conversation) as stream:
        stream.until_done()
    assert [view.turn.outcome for view in proxy.turns("conversation:conv_kim")] == ["exact"] * 2
    httpx2.post(f"{proxy.v1}/sessions/conversation:conv_kim/end", json={}).raise_for_status()
    for text in ("Three", "Four"):
        ask(model="fake", input=text, conversation="conv_kim")
    sent = [message["content"] for message in fake_engine.calls[-1].body["messages"]]
    assert sent == ["One", "One", "Two", "Two", "Three", "Three", "Four"]
    again = [view.turn for view in proxy.turns("conversation:conv_kim~2")]
    assert [turn.outcome for turn in again] == ["exact"] * 2
    assert again[1].parent_turn_id == again[0].turn_id
    with pytest.raises(openai.BadRequestError, match="not both"):
        ask(model="fake", input="x", conversation="conv_kim", previous_response_id=first.id)
