"""The rules for which calls are retries, and which answer a retry gets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.in_process import in_process_proxy

from proxy.auth import Principal
from proxy.calls import relay
from proxy.calls.replays import Replays, RequestIdentity, identify_request, keyed_digest
from proxy.dialects.chat import ChatCompletions
from proxy.sessions.digests import History
from proxy.sessions.forest import Forest, KnownTurn
from proxy.sessions.roles import Correction, Found
from proxy.writer.client import Writer
from turnwise.errors import Conflict, StoreUnavailable
from turnwise.store.turns import set_roles
from turnwise.types import Role

AGENT = Principal(tenant="a", role="agent", key_id="key")


def identity(
    text: str = "Hello.", *, key: str | None = None, principal: Principal = AGENT, **fields: Any
) -> RequestIdentity:
    call = ChatCompletions().parse(
        {"messages": [{"role": "user", "content": text}], **fields}, max_choices=1, max_messages=9
    )
    call.idempotency_key, call.session_id = key, principal.session_id
    digest = repr((text, fields)).encode() if call.idempotency_key is None else keyed_digest(call)
    return identify_request(call, principal, digest)


def answered(replays: Replays, request: RequestIdentity, answer: bytes | None, *, delivered: bool = True) -> None:
    """Finish a call."""
    left = asyncio.get_running_loop().create_future()
    attempt = replays.begin(request, left)
    if not delivered:
        left.set_result(None)
    replays.settle(attempt, answer)


async def answer_of(replays: Replays, request: RequestIdentity, *, is_retry: bool) -> bytes | None:
    """Return what a call gets without sampling."""
    attempt = await replays.find(request, is_retry=is_retry)
    return None if attempt is None else attempt.answer


async def test_an_undelivered_answer_is_given_to_one_retry_with_the_same_body():
    replays = Replays(10_000)
    answered(replays, identity(), b"delivered")
    assert await answer_of(replays, identity(), is_retry=True) is None
    answered(replays, identity(), b"first", delivered=False)
    answered(replays, identity(), b"second", delivered=False)
    assert await answer_of(replays, identity(), is_retry=False) is None
    assert [await answer_of(replays, identity(), is_retry=True) for _ in range(3)] == [b"first", b"second", None]


async def test_a_call_with_the_same_body_does_not_wait_for_a_call_whose_client_is_connected():
    """It is another rollout of the same prompt."""
    replays = Replays(10_000)
    replays.begin(identity(), asyncio.get_running_loop().create_future())
    assert await asyncio.wait_for(answer_of(replays, identity(), is_retry=True), 5) is None


async def test_a_retry_waits_for_a_first_call_whose_client_has_disconnected():
    replays = Replays(10_000)
    left = asyncio.get_running_loop().create_future()
    left.set_result(None)
    attempt = replays.begin(identity(), left)
    retry = asyncio.create_task(answer_of(replays, identity(), is_retry=True))
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
    assert await answer_of(replays, other, is_retry=True) is None


async def test_an_idempotency_key_gets_the_same_answer_each_time():
    """Whether or not it was delivered; a failed call is sampled again."""
    replays = Replays(10_000)
    answered(replays, identity(key="k"), None)
    assert await answer_of(replays, identity(key="k"), is_retry=False) is None
    answered(replays, identity(key="k"), b"answer")
    assert [await answer_of(replays, identity(key="k"), is_retry=False) for _ in range(2)] == [b"answer", b"answer"]


async def test_an_idempotency_key_with_another_request_is_refused():
    """It is also refused while the first call is running."""
    replays = Replays(10_000)
    attempt = replays.begin(identity(key="k"), asyncio.get_running_loop().create_future())
    for _ in range(2):
        with pytest.raises(Conflict, match="'k' was used with another request"):
            await answer_of(replays, identity("Bye.", key="k"), is_retry=False)
        replays.settle(attempt, b"answer")


async def test_the_oldest_answers_are_evicted_first():
    """Each takes 800 bytes and its length: 2,000 bytes hold two."""
    replays = Replays(2_000)
    for key in "abc":
        answered(replays, identity(key=key), b"answer")
    found = [await answer_of(replays, identity(key=key), is_retry=False) for key in "abc"]
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


@pytest.mark.parametrize("replay_bytes", [10**6, 0])
@pytest.mark.parametrize("field", ["conversation", "previous_response_id"])
def test_a_keyed_call_that_continues_stored_turns_and_refers_to_their_items_is_found_again(
    field: str, replay_bytes: int, tmp_path: Path
):
    keyed, start = {"idempotency-key": "k"}, {"input": "One", "conversation": "conv_kim"}
    with in_process_proxy(tmp_path, replay_bytes=replay_bytes) as (http, _):
        one, two = (http.post("/v1/responses", json=start).raise_for_status().json() for _ in range(2))
        given = [{"type": "item_reference", "id": one["output"][0]["id"]}, {"role": "user", "content": "Three"}]
        ask = {"input": given, field: {"conversation": "conv_kim", "previous_response_id": one["id"]}[field]}
        first, again = (http.post("/v1/responses", json=ask, headers=keyed).raise_for_status() for _ in range(2))
        assert again.json()["id"] == first.json()["id"]
        other = {"input": given, "previous_response_id": two["id"]}
        assert http.post("/v1/responses", json=other, headers=keyed).status_code == 409


@pytest.mark.parametrize("replay_bytes", [10**6, 0])
def test_a_repeated_answer_names_the_session_and_the_version_of_the_first(replay_bytes: int, tmp_path: Path):
    """In memory and in the store; neither call names a session."""
    ask, keyed = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}, {"idempotency-key": "k"}
    with in_process_proxy(tmp_path, replay_bytes=replay_bytes) as (http, _):
        first, again = (http.post("/v1/chat/completions", json=ask, headers=keyed).raise_for_status() for _ in range(2))
    assert again.json()["id"] == first.json()["id"]
    for name in ("x-session-id", "x-policy-version"):
        assert again.headers[name] == first.headers[name]


@pytest.mark.parametrize("replay_bytes", [10**6, 0])
def test_another_api_key_under_the_same_idempotency_key_samples_its_own_reply(replay_bytes: int, tmp_path: Path):
    """In memory and in the store; both name the same session."""
    ask, found = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}, []
    with in_process_proxy(tmp_path, replay_bytes=replay_bytes) as (http, _):
        for key in ("one", "other", "one", "other"):
            headers = {"authorization": f"Bearer {key}", "idempotency-key": "k"}
            reply = http.post("/sessions/s/v1/chat/completions", json=ask, headers=headers).raise_for_status()
            found.append(reply.json()["id"])
        assert len(http.get("/v1/sessions/s/turns").json()["data"]) == 2
    assert found == found[:2] * 2
    assert found[0] != found[1]


@pytest.mark.parametrize("path", ["/sessions/s/v1/chat/completions", "/v1/chat/completions"])
def test_the_answer_of_a_deleted_session_is_not_repeated(path: str, tmp_path: Path):
    """It is in memory under the key of the call; the next call under the key is sampled and stored."""
    ask, keyed = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}, {"idempotency-key": "k"}
    with in_process_proxy(tmp_path) as (http, _):
        first = http.post(path, json=ask, headers=keyed).raise_for_status()
        http.delete(f"/v1/sessions/{first.headers['x-session-id']}").raise_for_status()
        second = http.post(path, json=ask, headers=keyed).raise_for_status()
        assert second.json()["id"] != first.json()["id"]
        stored = http.get(f"/v1/sessions/{second.headers['x-session-id']}/turns").json()["data"]
        assert [turn["turn_id"] for turn in stored] == [second.json()["id"]]


def test_a_stored_turn_is_answered_although_the_roles_of_earlier_turns_cannot_be_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def correct(turn: KnownTurn, _: Forest, __: History) -> list[Correction]:
        return [Correction([turn.turn_id], Found(Role.SIDE, "asks_for_title"))]

    async def do(self: Writer, change: Any, *arguments: Any) -> Any:
        if change is set_roles:
            raise StoreUnavailable("the disk is full")
        return await original(self, change, *arguments)

    original = Writer.do
    monkeypatch.setattr(relay, "corrections", correct)
    monkeypatch.setattr(Writer, "do", do)
    ask = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
    with in_process_proxy(tmp_path) as (http, _):
        http.post("/sessions/s/v1/chat/completions", json=ask).raise_for_status()
        (turn,) = http.get("/v1/sessions/s/turns").json()["data"]
        counted = http.get("/metrics").text
    assert turn["outcome"] == "exact"
    assert turn["role"] == "main"
    assert "not_stored" not in counted
