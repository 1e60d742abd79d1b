"""A call whose request is decoded item by item, in a thread, is served and stored as any other."""

from typing import Any

import pytest
from support.in_process import in_process_proxy

NUM_MESSAGES = 2_501
"""With 10,000 strings."""
TEXTS = [f"t{number % 7}" for number in range(NUM_MESSAGES)]
ROLES = ["assistant" if number % 2 else "user" for number in range(NUM_MESSAGES)]
TURNS = [{"role": role, "content": text} for role, text in zip(ROLES, TEXTS, strict=True)]
CONTENTS = [
    {"role": "model" if role == "assistant" else role, "parts": [{"text": text}]}
    for role, text in zip(ROLES, TEXTS, strict=True)
]
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 4}, "id"),
    "messages": ("/v1/messages", {"messages": TURNS, "max_tokens": 4}, "id"),
    "responses": ("/v1/responses", {"input": TURNS, "max_output_tokens": 4}, "id"),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": CONTENTS}, "responseId"),
}


ALSO_SLOW = ("messages", "responses")
"""Dialects that only `make test-all` tests; `tests/real/test_dialects.py` has their short requests."""


@pytest.fixture(autouse=True)
def decode_in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.http.asgi.DECODED_HERE_STRINGS", 8_192)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALSO_SLOW else name for name in CALLS]
)
def test_a_long_request_is_answered_and_stored_whole(name, tmp_path):
    """Also under a key: the same request again gets the same answer, another one is refused."""
    path, body, id_field = CALLS[name]
    keyed = {"idempotency-key": "k"}
    with in_process_proxy(tmp_path) as (http, _):
        answer = http.post(f"/sessions/s{path}", json=body).raise_for_status().json()
        (turn,) = http.get("/v1/sessions/s/turns", params={"prompt": "whole"}).raise_for_status().json()["data"]
        assert turn["turn_id"] == answer[id_field]
        assert [(message["role"], message["content"]) for message in turn["messages"]] == list(
            zip(ROLES, TEXTS, strict=True)
        )
        assert len(turn["token_ids"]) > 0
        first, again = (http.post(f"/sessions/t{path}", json=body, headers=keyed).json() for _ in range(2))
        assert first == again
        other = http.post(f"/sessions/t{path}", json={**body, "temperature": 0.5, "top_p": 1}, headers=keyed)
        assert name == "gemini" or other.status_code == 409
        assert len(http.get("/v1/sessions/t/turns").json()["data"]) == 1


@pytest.mark.parametrize(
    "name", ["chat", *(pytest.param(name, marks=pytest.mark.slow) for name in CALLS if name != "chat")]
)
def test_a_request_with_too_many_strings_is_refused_with_the_limit(name, tmp_path, monkeypatch):
    path, body, _ = CALLS[name]
    monkeypatch.setattr("proxy.http.asgi.MAX_STRINGS", 9_000)
    with in_process_proxy(tmp_path) as (http, _):
        refused = http.post(path, json=body)
        assert refused.status_code == 413
        assert "more than 9000 strings, keys included" in refused.text
