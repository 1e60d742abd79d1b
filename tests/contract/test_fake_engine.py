"""The stand-in engine fails as its route or a header asks; tests/real/test_fake_engine_wire.py compares its replies."""

import json

import httpx2
import pytest

ASKED = {"messages": [{"role": "user", "content": "Hello."}], "return_token_ids": True}


def test_a_fault_is_planned_by_the_route_for_some_calls_and_by_the_header_for_one(fake_engine):
    def chat(fault: str = "") -> httpx2.Response:
        headers = {"x-fake-fault": fault} if fault else {}
        return httpx2.post(f"{fake_engine.url}/v1/chat/completions", json=ASKED, headers=headers)

    httpx2.post(f"{fake_engine.url}/fake/faults", json={"kind": "status", "status": 429, "count": 2})
    assert [chat().status_code for _ in range(3)] == [429, 429, 200]
    refused = chat("status;status=503")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
    with pytest.raises(json.JSONDecodeError):
        chat("malformed").json()
    bare = chat("no_token_ids").json()
    assert (bare["prompt_token_ids"], bare["choices"][0]["token_ids"]) == (None, None)
