"""The rules for which calls are retries, and which answer a retry gets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.in_process import in_process_proxy
from support.waiting import WAIT_SECONDS

from proxy.auth import Principal
from proxy.calls.capture import Attempt, request_digest
from proxy.dialects.base import Call
from proxy.dialects.chat import ChatCompletions
from proxy.features.retries import Retries
from proxy.sessions.conversation import ConversationDigests
from proxy.sessions.forest import KnownTurn, TurnForest
from proxy.writer.client import Writer
from turnwise.errors import Conflict, StoreUnavailable
from turnwise.features.roles import set_roles
from turnwise.types import Role

AGENT = Principal(tenant="a", role="agent", key_id="key", root_key_id="key")


class StoredTurns:
    async def fetch(self, _: Any, __: str, turn_ids: list[str]) -> list[str]:
        return turn_ids


def retries_of(max_bytes: int) -> Retries:
    return Retries(StoredTurns(), max_bytes)  # type: ignore[arg-type]


def asked(
    text: str = "Hello.", *, key: str | None = None, principal: Principal = AGENT, **fields: Any
) -> tuple[Call, Principal]:
    call = ChatCompletions().parse({"messages": [{"role": "user", "content": text}], **fields})
    call.idempotency_key, call.session_id, call.is_retry = key, principal.session_id, key is None
    return call, principal


async def begun(retries: Retries, request: tuple[Call, Principal], *, has_left: bool = False) -> Attempt:
    (call, principal), left = request, asyncio.get_running_loop().create_future()
    if has_left:
        left.set_result(None)
    return await retries.begin(call, principal, request_digest(call, repr(call.body).encode()), left)


async def answered(
    retries: Retries, request: tuple[Call, Principal], answer: bytes | None, *, delivered: bool = True
) -> None:
    request[0].is_retry = False
    retries.settle(await begun(retries, request, has_left=not delivered), answer)


async def answer_of(retries: Retries, request: tuple[Call, Principal]) -> bytes | None:
    """Return the answer that a call gets as a retry; None if it is sampled, which fails here."""
    attempt = await begun(retries, request)
    if attempt.answer is None:
        retries.settle(attempt, None)
    return attempt.answer


async def test_an_undelivered_answer_is_given_to_one_retry_with_the_same_body():
    retries = retries_of(10_000)
    await answered(retries, asked(), b"delivered")
    assert await answer_of(retries, asked()) is None
    await answered(retries, asked(), b"first", delivered=False)
    await answered(retries, asked(), b"second", delivered=False)
    unmarked = asked()
    unmarked[0].is_retry = False
    assert await answer_of(retries, unmarked) is None
    assert [await answer_of(retries, asked()) for _ in range(3)] == [b"first", b"second", None]


async def test_a_call_with_the_same_body_does_not_wait_for_a_call_whose_client_is_connected():
    """It is another rollout of the same prompt."""
    retries = retries_of(10_000)
    await begun(retries, asked())
    assert await asyncio.wait_for(answer_of(retries, asked()), WAIT_SECONDS) is None


async def test_a_retry_waits_for_a_first_call_whose_client_has_disconnected():
    retries = retries_of(10_000)
    first = await begun(retries, asked(), has_left=True)
    retry = asyncio.create_task(answer_of(retries, asked()))
    await asyncio.sleep(0)
    assert not retry.done()
    retries.settle(first, b"answer")
    assert await retry == b"answer"


@pytest.mark.parametrize(
    "other",
    [
        asked(principal=Principal(tenant="b", role="agent", key_id="key", root_key_id="key")),
        asked(principal=Principal(tenant="a", role="agent", key_id="other", root_key_id="other")),
        asked(principal=Principal(tenant="a", role="session", key_id="key", root_key_id="key", session_id="s")),
        asked("Bye."),
        asked(stream=True),
    ],
)
async def test_another_tenant_caller_session_request_or_form_is_no_retry(other: tuple[Call, Principal]):
    retries = retries_of(10_000)
    await answered(retries, asked(), b"answer", delivered=False)
    assert await answer_of(retries, other) is None


async def test_an_idempotency_key_with_another_request_is_refused():
    """It is also refused while the first call is running."""
    retries = retries_of(10_000)
    first = await begun(retries, asked(key="k"))
    for _ in range(2):
        with pytest.raises(Conflict, match="'k' was used with another request"):
            await answer_of(retries, asked("Bye.", key="k"))
        retries.settle(first, b"answer")


async def test_the_oldest_answers_are_evicted_first():
    """Each takes 800 bytes and its length: 2,000 bytes hold two."""
    retries = retries_of(2_000)
    for key in "abc":
        await answered(retries, asked(key=key), b"answer")
    found = [await answer_of(retries, asked(key=key)) for key in "abc"]
    assert found == [None, b"answer", b"answer"]


@pytest.mark.parametrize("cache_bytes", [10**7, 0])
@pytest.mark.parametrize("field", ["conversation", "previous_response_id"])
def test_a_keyed_call_that_continues_stored_turns_and_refers_to_their_items_is_found_again(
    field: str, cache_bytes: int, tmp_path: Path
):
    keyed, start = {"idempotency-key": "k"}, {"input": "One", "conversation": "conv_kim"}
    with in_process_proxy(tmp_path, cache_bytes=cache_bytes) as (http, _):
        one, two = (http.post("/v1/responses", json=start).raise_for_status().json() for _ in range(2))
        given = [{"type": "item_reference", "id": one["output"][0]["id"]}, {"role": "user", "content": "Three"}]
        ask = {"input": given, field: {"conversation": "conv_kim", "previous_response_id": one["id"]}[field]}
        first, again = (http.post("/v1/responses", json=ask, headers=keyed).raise_for_status() for _ in range(2))
        assert again.json()["id"] == first.json()["id"]
        other = {"input": given, "previous_response_id": two["id"]}
        assert http.post("/v1/responses", json=other, headers=keyed).status_code == 409


@pytest.mark.parametrize("cache_bytes", [10**7, 0])
def test_a_repeated_answer_names_the_session_and_the_version_of_the_first(cache_bytes: int, tmp_path: Path):
    """In memory and in the store; neither call names a session."""
    ask, keyed = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}, {"idempotency-key": "k"}
    with in_process_proxy(tmp_path, cache_bytes=cache_bytes) as (http, _):
        first, again = (http.post("/v1/chat/completions", json=ask, headers=keyed).raise_for_status() for _ in range(2))
    assert again.json()["id"] == first.json()["id"]
    for name in ("x-session-id", "x-policy-version"):
        assert again.headers[name] == first.headers[name]


@pytest.mark.parametrize("cache_bytes", [10**7, 0])
def test_another_api_key_under_the_same_idempotency_key_samples_its_own_reply(cache_bytes: int, tmp_path: Path):
    """In memory and in the store; both name the same session."""
    ask, found = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}, []
    with in_process_proxy(tmp_path, cache_bytes=cache_bytes) as (http, _):
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
    def correct(turn: KnownTurn, _: TurnForest, __: ConversationDigests) -> list[tuple[list[str], tuple[Role, str]]]:
        return [([turn.turn_id], (Role.SIDE, "asks_for_title"))]

    async def do(self: Writer, change: Any, *arguments: Any) -> Any:
        if change is set_roles:
            raise StoreUnavailable("the disk is full")
        return await original(self, change, *arguments)

    original = Writer.do
    monkeypatch.setattr("proxy.features.roles.chains.corrections", correct)
    monkeypatch.setattr(Writer, "do", do)
    ask = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
    with in_process_proxy(tmp_path) as (http, _):
        http.post("/sessions/s/v1/chat/completions", json=ask).raise_for_status()
        (turn,) = http.get("/v1/sessions/s/turns").json()["data"]
        counted = http.get("/metrics").text
    assert turn["outcome"] == "exact"
    assert turn["role"] == "main"
    assert "not_stored" not in counted
