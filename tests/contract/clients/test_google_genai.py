"""Google's SDK through the proxy: generate, stream, chats with tools and thinking, counting, models, errors."""

import uuid
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from google import genai
from google.genai import errors, types
from support.proxies import RunningProxy
from turnwise_fake_engine import Reply, Rule, ToolCall

from turnwise.types import Outcome

LOOK = types.FunctionDeclaration(
    name="look",
    description="Look it up.",
    parameters=types.Schema(
        type=types.Type.OBJECT, properties={"key": types.Schema(type=types.Type.STRING)}, required=["key"]
    ),
)
THINKING = types.ThinkingConfig(include_thoughts=True)


@pytest.fixture
def session_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def client(proxy: RunningProxy, session_id: str) -> Iterator[genai.Client]:
    base_url = f"{proxy.url}/sessions/{session_id}"
    with genai.Client(api_key="any", http_options=types.HttpOptions(base_url=base_url)) as client:
        yield client


def assert_one_exact_chain(proxy: RunningProxy, session_id: str, num_turns: int) -> None:
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [(turn.outcome, turn.reason, turn.dialect) for turn in turns] == [
        (Outcome.EXACT, None, "gemini")
    ] * num_turns
    assert len({turn.chain_id for turn in turns}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_tools_and_thinking_is_one_exact_chain(client, proxy, fake_engine, session_id, *, stream):
    """The SDK stores a streamed reply as one content per chunk; all of them are one reply of the chain."""
    calls = [ToolCall(name="look", arguments={"key": "é"}), ToolCall(name="look", arguments={"key": "b"})]
    fake_engine.answer(
        Rule(reply=Reply(reasoning="two and two", text="Four, then.", tool_calls=calls), contains="first")
    )
    config = types.GenerateContentConfig(
        system_instruction="Be kind.",
        tools=[types.Tool(function_declarations=[LOOK])],
        thinking_config=THINKING,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    chat = client.chats.create(model="fake", config=config)

    def send(message: Any) -> list[types.Part]:
        replies = list(chat.send_message_stream(message)) if stream else [chat.send_message(message)]
        assert replies[-1].candidates[0].finish_reason == types.FinishReason.STOP
        assert replies[-1].usage_metadata.candidates_token_count > 0
        return [part for reply in replies for part in reply.candidates[0].content.parts]

    parts = send("first")
    assert "".join(part.text for part in parts if part.thought) == "two and two"
    assert "".join(part.text for part in parts if part.text and not part.thought) == "Four, then."
    made = [part.function_call for part in parts if part.function_call]
    assert [(call.name, call.args) for call in made] == [("look", {"key": "é"}), ("look", {"key": "b"})]
    answers = [
        types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response={"output": "ok"}))
        for call in made
    ]
    send(answers)
    send("and now?")
    assert_one_exact_chain(proxy, session_id, 3)
    messages = proxy.turns(session_id)[-1].messages
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert fake_engine.calls[-1].body["tools"][0]["function"]["parameters"]["properties"] == {"key": {"type": "string"}}


def test_the_generation_config_becomes_the_engines_sampling_parameters(client, fake_engine):
    config = types.GenerateContentConfig(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        candidate_count=2,
        max_output_tokens=30,
        stop_sequences=["zzz"],
        seed=7,
        presence_penalty=0.1,
        response_logprobs=True,
        logprobs=2,
        response_mime_type="application/json",
        response_schema=types.Schema(type=types.Type.OBJECT, properties={"n": types.Schema(type=types.Type.INTEGER)}),
        thinking_config=types.ThinkingConfig(thinking_budget=0),
        safety_settings=[
            types.SafetySetting(
                category=types.HarmCategory.HARM_CATEGORY_HARASSMENT, threshold=types.HarmBlockThreshold.BLOCK_NONE
            )
        ],
    )
    made = client.models.generate_content(model="models/fake", contents="a number", config=config)
    assert len(made.candidates) == 2
    assert made.candidates[0].logprobs_result.chosen_candidates[0].log_probability <= 0
    assert len(made.candidates[0].logprobs_result.top_candidates[0].candidates) == 2
    sent = fake_engine.calls[-1].body
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "n": 2, "max_completion_tokens": 30, "seed": 7}
    assert expected.items() <= sent.items()
    assert sent["reasoning_effort"] == "none"
    schema = sent["response_format"]["json_schema"]["schema"]
    assert schema == {"type": "object", "properties": {"n": {"type": "integer"}}}


def test_the_end_of_a_reply_and_hidden_thoughts(client, fake_engine):
    fake_engine.answer(Rule(reply=Reply(reasoning="hm", text="one two three"), contains="count"))
    cut = client.models.generate_content(
        model="fake", contents="count", config=types.GenerateContentConfig(max_output_tokens=4)
    )
    assert cut.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS
    whole = client.models.generate_content(model="fake", contents="count")
    assert [(part.text, part.thought) for part in whole.candidates[0].content.parts] == [("one two three", None)]


def test_counting_models_and_errors(client):
    asked = types.GenerateContentConfig(max_output_tokens=2)
    used = client.models.generate_content(model="fake", contents="Hello there", config=asked).usage_metadata
    assert client.models.count_tokens(model="fake", contents="Hello there").total_tokens == used.prompt_token_count
    assert [model.name for model in client.models.list()] == ["models/fake"]
    assert client.models.get(model="fake").input_token_limit == 32768
    with pytest.raises(errors.ClientError, match="inlineData of type 'audio/wav'") as refused:
        client.models.generate_content(
            model="fake", contents=[types.Part.from_bytes(data=b"wav", mime_type="audio/wav"), "What is it?"]
        )
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")


def test_google_s_header_and_query_parameter_carry_the_api_key(proxy, session_id):
    """A session key names its session, so the turns show which key the proxy read."""
    key = httpx2.post(f"{proxy.v1}/sessions", json={"session_id": session_id}).json()["api_key"]
    asked = {"contents": [{"parts": [{"text": "Hi."}]}]}
    url = f"{proxy.url}/v1beta/models/fake:generateContent"
    for given in ({"headers": {"x-goog-api-key": key}}, {"params": {"key": key}}):
        assert httpx2.post(url, json=asked, **given).status_code == 200
    assert len(proxy.turns(session_id)) == 2
    refused = httpx2.post(url, json=asked, params={"key": "tws-wrong.key"})
    assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
    unknown = httpx2.get(f"{proxy.url}/v1beta/cachedContents")
    assert (unknown.status_code, unknown.json()["error"]["status"]) == (404, "NOT_FOUND")


def test_hosted_tools_are_dropped_and_named_in_a_header(proxy):
    asked = {"contents": [{"parts": [{"text": "Hi."}]}], "tools": [{"google_search": {}}, {"codeExecution": {}}]}
    made = httpx2.post(f"{proxy.url}/v1beta/models/fake:generateContent", json=asked)
    assert made.status_code == 200, made.text
    assert made.headers["x-turnwise-dropped-tools"] == "google_search, codeExecution"
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    assert 'turnwise_dropped_tools_total{tool="codeExecution"} 1.0' in metrics


def test_a_stream_without_alt_is_one_json_array(proxy):
    asked = {"contents": [{"role": "user", "parts": [{"text": "One two three"}]}]}
    made = httpx2.post(f"{proxy.url}/v1beta/models/fake:streamGenerateContent", json=asked)
    assert made.headers["content-type"].startswith("application/json")
    chunks = made.json()
    assert len(chunks) > 3
    texts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == "One two three"
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
    assert chunks[-1]["usageMetadata"]["promptTokenCount"] > 3
