"""Many reward lines in one request are checked outside of the event loop, with the same result."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest
from fastapi.exceptions import RequestValidationError
from fastapi.testclient import TestClient
from support.in_process import in_process_proxy

from proxy.routes.rewards import read_lines

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with in_process_proxy(tmp_path_factory.mktemp("rewards")) as (client, _):
        client.post("/sessions/s/v1/chat/completions", json=CHAT).raise_for_status()
        yield client


@pytest.mark.parametrize(("index", "bad"), [(0, {}), (1_234, {"session_id": "s", "value": "1"})])
def test_an_error_names_the_line_among_all_lines(http, index, bad):
    lines = [{"session_id": "s", "value": 1}] * 1_500
    lines[index] = bad
    with pytest.raises(RequestValidationError) as error:
        read_lines(orjson.dumps(lines))
    assert {each["loc"][:2] for each in error.value.errors()} == {("body", index)}
    refused = http.post("/v1/rewards", json=lines)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(f"`{index}.value`")


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"5", b"[{]", b'[{"session_id": "s", "value": NaN}]', b'{"value": 1}'])
def test_a_body_that_is_no_list_of_lines_is_refused(http, body):
    assert http.post("/v1/rewards", content=body).status_code == 422


def test_a_control_plane_body_that_would_hold_the_loop_is_refused(http):
    """Such a body is decoded on the loop: 51,000 keys take 16 ms, 16 MiB of text 17 ms."""
    many = http.post("/v1/sessions", json={"metadata": {f"k{number}": "v" for number in range(4_100)}})
    long = http.post("/v1/sessions", json={"metadata": {"text": "x" * 2**20}})
    assert [(each.status_code, each.json()["error"]["code"]) for each in (many, long)] == [(413, "too_large")] * 2
    assert http.post("/v1/sessions", json={"metadata": {"text": "x" * 1_000_000}}).status_code == 200
