"""The rules for which calls are retries, and which answer a retry gets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.in_process import in_process_proxy

from proxy.auth import Principal
from proxy.calls.replays import Replays, RequestIdentity, identify_request
from proxy.dialects.chat import ChatCompletions
from turnwise.errors import Conflict

AGENT = Principal(tenant="a", role="agent", key_id="key")


def identity(
    text: str = "Hello.", *, key: str | None = None, principal: Principal = AGENT, **fields: Any
) -> RequestIdentity:
    call = ChatCompletions().parse(
        {"messages": [{"role": "user", "content": text}], **fields}, max_choices=1, max_messages=9
    )
    call.idempotency_key = key
    digest = repr((text, fields)).encode() if call.idempotency_key is None else None
    return identify_request(call, principal, digest)


def answered(replays: Replays, request: RequestIdentity, answer: bytes | None, *, delivered: bool = True) -> None:
    """Finish a call."""
    left = asyncio.get_running_loop().create_future()
    attempt = replays.begin(request, left)
    if not delivered:
        left.set_result(None)
    replays.settle(attempt, answer)


async def test_an_undelivered_answer_is_given_to_one_retry_with_the_same_body():
    replays = Replays(10_000)
    answered(replays, identity(), b"delivered")
    assert await replays.find(identity(), is_retry=True) is None
    answered(replays, identity(), b"first", delivered=False)
    answered(replays, identity(), b"second", delivered=False)
    assert await replays.find(identity(), is_retry=False) is None
    assert [await replays.find(identity(), is_retry=True) for _ in range(3)] == [b"first", b"second", None]


async def test_a_call_with_the_same_body_does_not_wait_for_a_call_whose_client_is_connected():
    """It is another rollout of the same prompt."""
    replays = Replays(10_000)
    replays.begin(identity(), asyncio.get_running_loop().create_future())
    assert await asyncio.wait_for(replays.find(identity(), is_retry=True), 5) is None


async def test_a_retry_waits_for_a_first_call_whose_client_has_disconnected():
    replays = Replays(10_000)
    left = asyncio.get_running_loop().create_future()
    left.set_result(None)
    attempt = replays.begin(identity(), left)
    retry = asyncio.create_task(replays.find(identity(), is_retry=True))
    await asyncio.sleep(0)
    assert not retry.done()
    replays.settle(attempt, b"answer")
    assert await retry == b"answer"


@pytest.mark.parametrize(
    "other",
    [
        identity(principal=Principal(tenant="b", role="agent", key_id="key")),
        identity(principal=Principal(tenant="a", role="agent", key_id="other")),
        identity(principal=Principal(tenant="a", role="session", key_id="key", session_id="s")),
        identity("Bye."),
        identity(stream=True),
    ],
)
async def test_another_tenant_caller_session_request_or_form_is_no_retry(other: RequestIdentity):
    replays = Replays(10_000)
    answered(replays, identity(), b"answer", delivered=False)
    assert await replays.find(other, is_retry=True) is None


async def test_an_idempotency_key_gets_the_same_answer_each_time():
    """Whether or not it was delivered; a failed call is sampled again."""
    replays = Replays(10_000)
    answered(replays, identity(key="k"), None)
    assert await replays.find(identity(key="k"), is_retry=False) is None
    answered(replays, identity(key="k"), b"answer")
    assert [await replays.find(identity(key="k"), is_retry=False) for _ in range(2)] == [b"answer", b"answer"]


async def test_an_idempotency_key_with_another_request_is_refused():
    """It is also refused while the first call is running."""
    replays = Replays(10_000)
    attempt = replays.begin(identity(key="k"), asyncio.get_running_loop().create_future())
    for _ in range(2):
        with pytest.raises(Conflict, match="'k' was used with another request"):
            await replays.find(identity("Bye.", key="k"), is_retry=False)
        replays.settle(attempt, b"answer")


async def test_the_oldest_answers_are_evicted_first():
    """Each takes 800 bytes and its length: 2,000 bytes hold two."""
    replays = Replays(2_000)
    for key in "abc":
        answered(replays, identity(key=key), b"answer")
    found = [await replays.find(identity(key=key), is_retry=False) for key in "abc"]
    assert found == [None, b"answer", b"answer"]


@pytest.mark.parametrize("replay_bytes", [10**6, 0])
def test_a_keyed_call_of_a_conversation_is_found_again_although_its_turn_is_the_newest(
    replay_bytes: int, tmp_path: Path
):
    """In memory and in the store: what a retry continues by then is no part of its request."""
    ask, keyed = {"input": "One", "conversation": "conv_kim"}, {"idempotency-key": "k"}
    with in_process_proxy(tmp_path, replay_bytes=replay_bytes) as (http, _):
        first, again = (http.post("/v1/responses", json=ask, headers=keyed).raise_for_status() for _ in range(2))
        assert again.json()["id"] == first.json()["id"]
        assert http.post("/v1/responses", json={**ask, "input": "Two"}, headers=keyed).status_code == 409
        assert len(http.get("/v1/sessions/conversation:conv_kim/turns").json()["data"]) == 1
