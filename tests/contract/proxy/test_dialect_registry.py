"""A wire format is one registry entry: its routes, error shape and descriptions need no change anywhere else."""

from collections.abc import Iterator
from typing import Any, ClassVar

import orjson
import pytest
from fastapi.testclient import TestClient
from support.in_process import in_process_proxy

from proxy import features
from proxy.dialects.base import WireRoute
from proxy.dialects.chat import ChatCompletions
from proxy.features.upstream.routes import UpstreamEndpoint
from proxy.routes.calls import SampleEndpoint


class Shouted(ChatCompletions):
    """A wire format for this test: chat under another path, with errors in one upper-case field."""

    name = "shouted"
    routes: ClassVar = (WireRoute(path="/shout/{model:path}:now", summary="Shout", required=("messages",)),)
    error_prefixes = ("/shout",)
    error_schema: ClassVar = {"type": "object", "required": ["OOPS"]}
    id_prefix = "shout-"
    reads_url = True

    def merge_url(self, body, route, params, query):
        return {**body, "model": params["model"], "stop": query.get("stop")}

    def encode_error(self, status, body):
        return orjson.dumps({"OOPS": orjson.loads(body)["error"]["message"].upper()})


@pytest.fixture
def client(tmp_path, monkeypatch) -> Iterator[TestClient]:
    monkeypatch.setattr(features, "DIALECTS", (*features.DIALECTS, Shouted()))
    with in_process_proxy(tmp_path) as (client, _):
        yield client


def test_a_registered_dialect_is_served_and_documented_and_has_its_own_error_shape(client):
    asked = {"messages": [{"role": "user", "content": "Hello there"}]}
    for prefix in ("", "/sessions/s1"):
        reply = client.post(f"{prefix}/shout/fake:now?stop=there", json=asked)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "Hello "
        assert client.post(f"{prefix}/shout/fake:now", json={"messages": 1}).json()["OOPS"].startswith("`MESSAGES`")
        assert "NOT FOUND" in client.get(f"{prefix}/shout/nothing").json()["OOPS"]
    (turn,) = client.get("/v1/sessions/s1/turns").json()["data"]
    assert turn["dialect"] == "shouted"
    paths = client.get("/openapi.json").json()["paths"]
    operation = paths["/sessions/{session_id}/shout/{model}:now"]["post"]
    assert [each["name"] for each in operation["parameters"]][:2] == ["session_id", "model"]
    assert operation["responses"]["4XX"]["content"]["application/json"]["schema"] == Shouted.error_schema


def test_a_model_name_with_a_line_feed_is_refused_in_the_shape_of_its_dialect(client):
    """If the pattern's `.` did not match a line feed, no route would match, and the 404 would have OpenAI's shape."""
    for prefix in ("", "/sessions/s1"):
        answer = client.post(f"{prefix}/v1/models/no%0Amodel:generateContent", json={"contents": []})
        assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")


def test_an_unexpected_error_is_answered_in_the_shape_of_its_dialect_and_logged(client, monkeypatch, caplog):
    async def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("proxy.features.lengths.continued_length", fail)
    monkeypatch.setattr(UpstreamEndpoint, "serve", fail)
    monkeypatch.setattr(SampleEndpoint, "serve", fail)
    body = {"messages": [{"role": "user", "content": "Hello."}], "model": "fake", "max_tokens": 1}
    for number, path in enumerate(("/v1/messages/count_tokens", "/v1/messages", "/v1/embeddings"), start=1):
        answer = client.post(path, json=body)
        assert (answer.status_code, "type" in answer.json()) == (500, path != "/v1/embeddings"), answer.text
        assert "its log has the traceback" in answer.json()["error"]["message"]
        assert caplog.text.count("RuntimeError: a defect") == number
    assert answer.json()["error"]["code"] == "internal_error"
    assert 'turnwise_refused_total{code="internal_error"} 3.0' in client.get("/metrics").text
