"""The model names of calls, and what the proxy forwards to a configured upstream."""

import http.server
import json
import threading
from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest
from support.proxies import assert_served_is_stored
from support.servers import serving

HELLO = {"messages": [{"role": "user", "content": "Hello there"}]}


def test_by_default_every_name_is_the_served_policy_and_the_reply_repeats_it(shared_proxy):
    proxy, engine = shared_proxy.proxy, shared_proxy.engine
    client = openai.OpenAI(base_url=proxy.session_v1("names"), api_key="any", max_retries=0)
    claude = anthropic.Anthropic(base_url=f"{proxy.url}/sessions/names", api_key="any", max_retries=0)
    asked: list = HELLO["messages"]
    assert client.chat.completions.create(model="gpt-4.1-mini", messages=asked).model == "gpt-4.1-mini"
    chunks = client.chat.completions.create(model="org/Títle-9", messages=asked, stream=True)
    assert {chunk.model for chunk in chunks} == {"org/Títle-9"}
    assert claude.messages.create(model="claude-opus", max_tokens=9, messages=asked).model == "claude-opus"
    assert client.responses.create(model="o9", input="Hello there").model == "o9"
    assert httpx2.post(f"{proxy.v1}/chat/completions", json=HELLO).json()["model"] == "fake"
    assert {call.body["model"] for call in engine.calls} == {"fake"}
    assert [view.turn.model for view in proxy.turns("names")] == ["gpt-4.1-mini", "org/Títle-9", "claude-opus", "o9"]
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("org/gpt-5").id == "org/gpt-5"
    assert [model.id for model in claude.models.list()] == ["fake"]
    assert claude.messages.count_tokens(model="claude-opus", messages=asked).input_tokens > 3
    with pytest.raises(openai.NotFoundError, match="policy version"):
        client.chat.completions.create(model="policy-v0", messages=asked)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("policy-v0")
    assert_served_is_stored(proxy, engine)


def test_a_setting_maps_names_and_patterns(start_proxy, fake_engine):
    """The first matching pattern decides; a name without a match is refused."""
    rules = '{"gpt-secret": "refuse", "gpt-*": "policy", "house-model": "policy"}'
    proxy = start_proxy(fake_engine.url, "--model-names", rules)
    statuses = {
        name: httpx2.post(f"{proxy.v1}/chat/completions", json={**HELLO, "model": name}).status_code
        for name in ("fake", "gpt-4", "house-model", "gpt-secret", "other", "policy-v1", "gpt-" + "x" * 300)
    }
    assert statuses == {
        **dict.fromkeys(("fake", "gpt-4", "house-model"), 200),
        **dict.fromkeys(("gpt-secret", "other", "policy-v1", "gpt-" + "x" * 300), 404),
    }
    listed = httpx2.get(f"{proxy.v1}/models").json()["data"]
    assert [model["id"] for model in listed] == ["fake", "house-model"]


def test_a_strict_proxy_serves_the_engine_s_own_name_only(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url, "--model-names", "strict")
    refused = httpx2.post(f"{proxy.v1}/chat/completions", json={**HELLO, "model": "gpt-4"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "'fake'" in refused.json()["error"]["message"]


class Embeddings(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["content-length"]))
        received = {"path": self.path, "key": self.headers["authorization"], "asked": json.loads(asked)}
        body = json.dumps({"object": "list", "data": [], "model": "e", "received": received}).encode()
        self.send_response(200 if "v9" in self.path else 404)
        self.send_header("content-type", "application/x-told")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Disable the access log."""


@pytest.fixture
def upstream() -> Iterator[str]:
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Embeddings)) as url:
        yield f"{url}/v9"


def test_a_configured_upstream_gets_the_request_with_its_own_key(start_proxy, fake_engine, upstream):
    proxy = start_proxy(fake_engine.url, "--upstream", upstream, "--upstream-api-key", "theirs")
    for base in (proxy.v1, proxy.session_v1("s")):
        asked = {"model": "e", "input": "text"}
        reply = httpx2.post(f"{base}/embeddings", json=asked, headers={"authorization": "Bearer ours"})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-told")
        assert reply.json()["received"] == {"path": "/v9/embeddings", "key": "Bearer theirs", "asked": asked}
    assert not proxy.turns()


class Media(http.server.BaseHTTPRequestHandler):
    """Answers forms with their fields, and speech in two parts, the second once `heard` is set."""

    heard = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "audio/mpeg" if "speech" in self.path else "application/json")
        self.end_headers()
        if "speech" in self.path:
            self.wfile.write(b"one")
            self.wfile.flush()
            if self.heard.wait(300.0):
                self.wfile.write(b"two")
        else:
            is_form = b"form-data" in body and self.headers["content-type"].startswith("multipart/form-data; boundary=")
            self.wfile.write(json.dumps({"text": str(is_form), "created": 1, "data": []}).encode())

    def log_message(self, *_: object) -> None:
        """Disable the access log."""


def test_forms_and_streams_of_sound_are_passed_on_as_they_come(start_proxy, fake_engine):
    """Also to a proxy without keys, where only what a web page can send without a preflight must be JSON."""
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Media)) as url:
        proxy = start_proxy(fake_engine.url, "--upstream", url)
        with openai.OpenAI(base_url=proxy.v1, api_key="none", max_retries=0) as client:
            file = ("a.wav", b"RIFF")
            assert client.audio.transcriptions.create(model="whisper-1", file=file).text == "True"
            for path in ("audio/translations", "images/edits", "images/variations"):
                form = httpx2.post(f"{proxy.v1}/{path}", files={"file": b"x"}, headers={"authorization": "Bearer none"})
                assert form.json()["text"] == "True"
            asked = {"model": "tts-1", "voice": "alloy", "input": "Hi."}
            with client.audio.speech.with_streaming_response.create(**asked) as answer:
                parts = answer.iter_bytes()
                assert next(parts) == b"one"
                Media.heard.set()
                assert b"".join(parts) == b"two"
        form = httpx2.post(f"{proxy.v1}/audio/transcriptions", files={"file": b"RIFF"})
        assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_without_an_upstream_the_error_names_the_setting(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url)
    with (
        openai.OpenAI(base_url=proxy.v1, api_key="any", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="`upstream`"),
    ):
        client.embeddings.create(model="text-embedding-3-small", input="text")
    with (
        openai.OpenAI(base_url=proxy.v1, api_key="any", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="`upstream`"),
    ):
        client.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"RIFF"))
    assert httpx2.post(f"{proxy.v1}/messages/batches", json={}).json()["type"] == "error"
    google = httpx2.post(f"{proxy.url}/v1beta/models/e:embedContent", json={})
    assert google.json()["error"]["status"] == "NOT_FOUND"
