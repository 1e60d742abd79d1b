"""Requests in the shapes that the formats' own documents allow, translated to chat messages and sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.base import Call
from proxy.dialects.gemini import Gemini
from proxy.dialects.messages import Messages
from turnwise.errors import InvalidRequest


def messages_call(*messages: dict[str, Any]) -> Call:
    return Messages().parse({"max_tokens": 9, "messages": list(messages)}, max_choices=1, max_messages=99)


def gemini_call(**body: Any) -> Call:
    return Gemini().parse({"model": "m", "stream": False, **body}, max_choices=4, max_messages=99)


def test_consecutive_messages_of_a_role_are_one_message() -> None:
    """Several clients send one reply back as two messages, its text and its call."""
    text = {"type": "text", "text": "Let me look."}
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {"n": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "ok"}
    asked = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    one = messages_call(
        *asked,
        {"role": "assistant", "content": [text, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    )
    two = messages_call(
        *asked,
        {"role": "assistant", "content": "Let me look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
        {"role": "user", "content": "go on"},
    )
    assert two.messages == one.messages
    assert [message["role"] for message in one.messages] == ["user", "assistant", "tool", "user"]
    assert one.messages[0]["content"] == "a\nb"


def test_google_s_own_bodies_with_objects_for_lists_and_strings_for_numbers_are_read() -> None:
    """Protobuf's JSON allows both, and Google's examples for curl use them."""
    declared = {"name": "look", "parameters": {"type": "OBJECT", "properties": {}}}
    call = gemini_call(
        contents={"role": "USER", "parts": {"text": "Hi."}},
        tools={"function_declarations": declared},
        generationConfig={
            "temperature": "0.5",
            "maxOutputTokens": "30",
            "seed": "0",
            "topK": "5",
            "candidateCount": "2",
        },
    )
    assert call.messages == [{"role": "user", "content": "Hi."}]
    assert call.num_choices == 2
    expected = {"temperature": 0.5, "max_completion_tokens": 30, "seed": 0, "top_k": 5, "n": 2}
    assert expected.items() <= call.body.items()
    assert call.tools is not None
    assert call.tools[0]["function"]["name"] == "look"
    with pytest.raises(InvalidRequest, match="`temperature` is a number"):
        gemini_call(contents=[{"parts": [{"text": "Hi."}]}], generationConfig={"temperature": "warm"})


def test_an_image_in_a_function_response_reaches_the_engine() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "aGk="}}
    response = {"name": "look", "response": {"output": "see"}, "parts": [image]}
    call = gemini_call(
        contents=[
            {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": response}]},
        ]
    )
    assert [message["role"] for message in call.messages] == ["assistant", "tool", "user"]
    (part,) = call.messages[-1]["content"]
    assert part["image_url"]["url"] == "data:image/png;base64,aGk="


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_each_effort_reaches_the_engine_by_its_own_name(effort: str) -> None:
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "output_config": {"effort": effort}}
    assert Messages().parse(asked, max_choices=1, max_messages=9).body["reasoning_effort"] == effort
    for level in (effort.upper(), "MINIMAL"):
        config = {"thinkingConfig": {"thinkingLevel": level}}
        call = gemini_call(contents=[{"parts": [{"text": "Hi."}]}], generationConfig=config)
        assert call.body["reasoning_effort"] == level.lower()
