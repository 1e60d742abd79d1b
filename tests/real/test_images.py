"""Images in each wire format: files reach the engine as data URLs, no URL does, and a model without sight refuses."""

import base64
import hashlib
from typing import Any

import httpx2
import pytest
from google.genai import types
from support.proxies import ProxyAndEngine, RunningProxy

from turnwise.types import Outcome

DATA = "iVBORw0KGgo+/w=="
INLINE_URL = f"data:image/png;base64,{DATA}"
LINK = "https://example.com/cat.png"
GEMINI_DATA = types.Blob(data=base64.b64decode(DATA), mime_type="image/png").model_dump(mode="json")["data"]
"""As Google's SDK writes it: with another alphabet."""


def chat(image: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = {"type": "text", "text": "Look."}
    return "v1/chat/completions", {"messages": [{"role": "user", "content": [text, image]}]}


def responses(image: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = {"type": "input_text", "text": "Look."}
    return "v1/responses", {"input": [{"role": "user", "content": [text, image]}]}


def messages(image: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = {"type": "text", "text": "Look."}
    return "v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [text, image]}]}


def tool_result(image: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A picture that a tool of the Messages API returns, such as a screenshot."""
    used = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Look."}, image]}
    conversation = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [result]},
    ]
    return "v1/messages", {"max_tokens": 9, "messages": conversation}


def gemini(image: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "Look."}, image]}]}


SERVED: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "chat, base64": (chat({"type": "image_url", "image_url": {"url": INLINE_URL}}), INLINE_URL),
    "chat, url": (chat({"type": "image_url", "image_url": {"url": LINK}}), LINK),
    "responses, base64": (responses({"type": "input_image", "image_url": INLINE_URL}), INLINE_URL),
    "responses, url": (responses({"type": "input_image", "image_url": LINK}), LINK),
    "messages, base64": (
        messages({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}),
        INLINE_URL,
    ),
    "messages, url": (messages({"type": "image", "source": {"type": "url", "url": LINK}}), LINK),
    "messages, a tool's": (tool_result({"type": "image", "source": {"type": "url", "url": LINK}}), LINK),
    "gemini, base64": (gemini({"inlineData": {"mimeType": "image/png", "data": GEMINI_DATA}}), INLINE_URL),
    "gemini, url": (gemini({"fileData": {"mimeType": "image/png", "fileUri": LINK}}), LINK),
}


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


@pytest.mark.parametrize("case", SERVED)
def test_a_file_reaches_the_engine_and_a_url_does_not(proxy, shared_engine, session_id, case):
    (route, body), url = SERVED[case]
    reply = httpx2.post(f"{proxy.url}/sessions/{session_id}/{route}", json=body)
    if url == LINK:
        assert (reply.status_code, "fetch_images" in reply.text) == (400, True)
        return
    assert reply.status_code == 200, reply.text
    contents = [message["content"] for message in shared_engine.calls[-1].body["messages"]]
    images = [part for content in contents if isinstance(content, list) for part in content if part["type"] != "text"]
    assert images == [{"type": "image_url", "image_url": {"url": url}}]
    assert "Look." in str(contents)
    (view,) = proxy.turns(session_id)
    assert (view.turn.outcome, view.turn.reason) == (Outcome.UNTRAINABLE, "image_places_unknown")
    named = {"type": "image_url", "image_url": {"url": f"image:{hashlib.sha256(base64.b64decode(DATA)).hexdigest()}"}}
    assert named in view.messages[-1]["content"]


@pytest.mark.engine
def test_a_model_without_images_refuses_each_with_a_sentence(engine, start_proxy, session_id):
    proxy = start_proxy(engine.url)
    asked = {case: served for case, served in SERVED.items() if served[1] != LINK}
    for case, ((route, body), _) in asked.items():
        refused = httpx2.post(f"{proxy.url}/sessions/{session_id}/{route}", json=body)
        assert refused.status_code == 400, (case, refused.text)
        assert "multimodal" in refused.json()["error"]["message"], (case, refused.text)
    assert [view.turn.outcome for view in proxy.turns(session_id)] == [Outcome.ERROR] * len(asked)
