"""A call whose client has left waits for nothing, and a call that has its session ends with exactly one outcome."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp
from support.in_process import in_process_proxy

from proxy.calls import relay
from proxy.engines.http_client import HttpClient
from proxy.engines.pool import EnginePool
from proxy.features.limits.bodies import ArrivingBody
from proxy.features.retries import Retries
from proxy.http.connections import LEFT
from proxy.sessions.place import Sessions
from proxy.writer.client import Writer
from turnwise.errors import Conflict, NotFound, ReloadFailed, StoreUnavailable
from turnwise.features import retention

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
KEYED = {"idempotency-key": "k"}
LEAVES = {"x-leaves": "1"}
"""A request with this header is served after its client has closed the connection."""


def leaving(app: ASGIApp) -> ASGIApp:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if (b"x-leaves", b"1") in scope.get("headers", ()):
            scope["extensions"][LEFT].set_result(None)
        await app(scope, receive, send)

    return serve


@pytest.fixture
def http(tmp_path: Path) -> Iterator[Any]:
    unused = "http://127.0.0.1:9"
    with in_process_proxy(tmp_path, wrap=leaving, engine_wait_seconds=600.0, upstream=unused) as (client, _):
        yield client


def turns_counted(http: httpx2.Client) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["outcome"], sample.labels["reason"]): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == "turnwise_turns_total"
    }


def test_a_call_does_not_wait_for_the_first_engine_after_its_client_has_left(http, monkeypatch):
    monkeypatch.setattr(EnginePool, "_is_one_expected", lambda _: True)
    for part, name, value in ((EnginePool, "serving", []), (Sessions, "template", None)):
        monkeypatch.setattr(part, name, property(lambda _, value=value: value, lambda *_: None), raising=False)
    assert http.post("/v1/chat/completions", json=CHAT, headers=LEAVES).status_code == 499
    assert http.get("/v1/sessions").json()["data"] == []


@pytest.mark.parametrize("marked", [KEYED, {"x-stainless-retry-count": "1"}])
def test_a_retry_does_not_wait_for_the_first_call_after_its_client_has_left(http, monkeypatch, marked):
    """The first call of each kind never settles here."""
    monkeypatch.setattr(Retries, "settle", lambda *_: None)
    first = KEYED if marked is KEYED else LEAVES
    http.post("/v1/chat/completions", json=CHAT, headers=first)
    assert http.post("/v1/chat/completions", json=CHAT, headers=LEAVES | marked).status_code == 499


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "user": "x" * 100_000}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/embeddings", {}),
        ("/v1/rewards", {"session_id": "s", "value": 1.0}),
    ],
)
def test_a_request_does_not_wait_for_the_memory_of_its_body_after_its_client_has_left(http, monkeypatch, path, body):
    monkeypatch.setattr(ArrivingBody, "_fits", lambda *_: False)
    assert http.post(path, json=body, headers=LEAVES).status_code == 499


@pytest.mark.parametrize(
    ("part", "name", "error", "status", "reason"),
    [
        (EnginePool, "admit", Conflict("no engine has it", code="version_not_loaded"), 409, "version_not_loaded"),
        (EnginePool, "admit", ReloadFailed("the engine refused it"), 502, "reload_failed"),
        (EnginePool, "admit", StoreUnavailable("locked"), 503, "not_stored"),
        (Sessions, "plan", RuntimeError("a defect"), 500, "internal_error"),
        (HttpClient, "request", RuntimeError("a defect"), 500, "internal_error"),
        (Writer, "append", StoreUnavailable("locked"), 503, "not_stored"),
        (Writer, "append", NotFound("the session was deleted"), 404, "not_stored"),
        (Writer, "append", Conflict("another session has this turn"), 409, "not_stored"),
        (Writer, "append", RuntimeError("a defect"), 500, "not_stored"),
    ],
)
def test_a_call_that_fails_in_its_session_is_counted_once(http, monkeypatch, part, name, error, status, reason):
    async def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(part, name, fail)
        assert http.post("/sessions/s/v1/chat/completions", json=CHAT).status_code == status
    assert turns_counted(http) == {("error", reason): 1.0}
    stored = http.get("/v1/sessions/s/turns").json()["data"]
    assert [turn["reason"] for turn in stored] == ([] if reason == "not_stored" else [reason])


def test_nothing_of_a_stream_is_stored_that_a_defect_ended(http, monkeypatch):
    """It is not known what of it was captured as it was sampled."""
    original = relay.take_events

    def fail(*arguments: Any) -> None:
        assert original(*arguments)
        raise RuntimeError("a defect")

    monkeypatch.setattr(relay, "take_events", fail)
    assert http.post("/sessions/s/v1/chat/completions", json={**CHAT, "stream": True}).status_code == 500
    assert turns_counted(http) == {("error", "internal_error"): 1.0}
    (turn,) = http.get("/v1/sessions/s/turns").json()["data"]
    assert (turn["outcome"], turn["reason"], turn["token_ids"]) == ("error", "internal_error", [])


def test_a_failed_call_that_cannot_be_stored_is_counted_once(http, monkeypatch):
    async def fail(error: Exception) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(EnginePool, "admit", lambda *_, **__: fail(ReloadFailed("the engine refused it")))
        broken.setattr(Writer, "append", lambda *_: fail(StoreUnavailable("locked")))
        assert http.post("/sessions/s/v1/chat/completions", json=CHAT).status_code == 503
    assert turns_counted(http) == {("error", "not_stored"): 1.0}


def test_a_session_that_another_proxy_deleted_is_created_anew_by_the_call_after_the_first(tmp_path):
    with in_process_proxy(tmp_path) as (http, database):
        assert http.post("/sessions/s/v1/chat/completions", json=CHAT).status_code == 200
        retention.delete_all(database, lambda conn: retention.delete_session(conn, "default", "s"))
        answers = [http.post("/sessions/s/v1/chat/completions", json=CHAT).status_code for _ in range(2)]
        assert answers == [404, 200]
