"""Routes that the engines do not serve: passed to a configured upstream, else 404 with a sentence."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import httpx2
import openai
import pytest
from support.proxies import StartProxy
from turnwise_fake_engine import RunningFakeEngine


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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Embeddings)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v9"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_configured_upstream_gets_the_request_with_its_own_key(
    start_proxy: StartProxy, fake_engine: RunningFakeEngine, upstream: str
) -> None:
    proxy = start_proxy(fake_engine.url, "--upstream", upstream, "--upstream-api-key", "theirs")
    for base in (proxy.v1, proxy.session_v1("s")):
        asked = {"model": "e", "input": "text"}
        reply = httpx2.post(f"{base}/embeddings", json=asked, headers={"authorization": "Bearer ours"})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-told")
        assert reply.json()["received"] == {"path": "/v9/embeddings", "key": "Bearer theirs", "asked": asked}
    assert not proxy.turns()


def test_without_an_upstream_the_error_names_the_setting(
    start_proxy: StartProxy, fake_engine: RunningFakeEngine
) -> None:
    proxy = start_proxy(fake_engine.url)
    with (
        openai.OpenAI(base_url=proxy.v1, api_key="any", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="`upstream`"),
    ):
        client.embeddings.create(model="text-embedding-3-small", input="text")
    assert httpx2.post(f"{proxy.v1}/messages/batches", json={}).json()["type"] == "error"
    google = httpx2.post(f"{proxy.url}/v1beta/models/e:embedContent", json={})
    assert google.json()["error"]["status"] == "NOT_FOUND"
