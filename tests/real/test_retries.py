"""Retried calls through a running proxy: no client gets the answer to another client's call."""

import asyncio
import http.client
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from support.control_plane import metric
from support.proxies import RunningProxy
from support.waiting import wait_until
from turnwise_fake_engine import RunningFakeEngine
from turnwise_fake_engine.delivery import Delivery
from turnwise_fake_engine.script import Fault, FaultKind, Reply, Rule

from turnwise.types import Outcome

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def post(
    proxy: RunningProxy, body: dict[str, Any] = CHAT, *, url: str | None = None, **headers: str
) -> httpx2.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    address = f"{url or proxy.v1}/chat/completions"
    return httpx2.post(address, json=body, headers=given)


def test_parallel_rollouts_that_are_retried_each_get_their_own_sample(fake_engine, start_proxy):
    """Eight equal calls of the standard SDK, of which two at a time are admitted: the others are retried after 429."""
    proxy = start_proxy(fake_engine.url, "--max-concurrent-calls", "2")
    fake_engine.answer(Rule(contains="Hello.", reply=Reply(text="Hi.", pace_seconds=0.05)))

    async def play() -> list[str]:
        async with AsyncOpenAI(base_url=proxy.v1, api_key="none", max_retries=50) as client:
            calls = [client.chat.completions.create(**CHAT) for _ in range(8)]
            return [completion.id for completion in await asyncio.gather(*calls)]

    ids = asyncio.run(play())
    assert len(set(ids)) == 8
    assert sorted(view.turn.turn_id for view in proxy.turns()) == sorted(ids)


def call_and_leave_before_the_commit(proxy: RunningProxy, engine: RunningFakeEngine) -> None:
    """Give up while the turn waits for the locked database; it is stored after that."""
    lock = sqlite3.connect(proxy.database_url.removeprefix("sqlite:///"), isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    num_calls = len(engine.calls)
    client = http.client.HTTPConnection(proxy.url.removeprefix("http://"))
    body = httpx2.Request("POST", proxy.url, json=CHAT).content  # the retries' body, byte for byte
    client.request("POST", "/sessions/s/v1/chat/completions", body, {"content-type": "application/json"})
    wait_until(lambda: [each.outcome for each in engine.calls[num_calls:]] == ["finished"], "the engine has answered")
    wait_until(lambda: metric(proxy, "turnwise_writer_queue") > 0, "the turn waits to be written")
    client.close()
    lock.execute("ROLLBACK")
    lock.close()


def test_a_retry_gets_an_undelivered_answer_while_no_other_call_has_a_place(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--max-concurrent-calls", "1")
    url = proxy.session_v1("s")
    post(proxy, url=url).raise_for_status()
    call_and_leave_before_the_commit(proxy, fake_engine)
    wait_until(lambda: len(proxy.turns("s")) == 2, "the turn is stored")
    wait_until(lambda: metric(proxy, "turnwise_calls_in_flight") == 0, "its place is free")
    fake_engine.fail_next(Fault(kind=FaultKind.HANG_STREAM, contains="slowly"))
    slow = {**CHAT, "messages": [{"role": "user", "content": "slowly"}], "stream": True}
    with httpx2.stream("POST", f"{proxy.v1}/chat/completions", json=slow) as running:
        lines = running.iter_lines()  # closing it would end the call
        assert next(lines)
        retried = [post(proxy, url=url, x_stainless_retry_count="1") for _ in range(2)]
    assert [reply.status_code for reply in retried] == [200, 429]
    assert retried[0].json()["id"] == proxy.turns("s")[1].turn.turn_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_at_two_proxies_at_once_is_one_turn(fake_engine, start_proxy, monkeypatch, stream):
    """The reply that is stored second is replaced by the stored one; a stream that has begun ends with an error."""
    one = start_proxy(fake_engine.url)
    other = start_proxy(fake_engine.url, database_url=one.database_url)
    fake_engine.answer(Rule(contains="Hello.", reply=Reply(text="Hi, this takes a while.", pace_seconds=0.001)))
    begun, may_end, write = [], threading.Event(), Delivery._write

    async def write_and_hold(delivery: Delivery, send: Any, abort: Any) -> None:
        async def send_and_hold(message: dict[str, Any]) -> None:
            await send(message)
            while not may_end.is_set():  # noqa: ASYNC110  the engine runs in another thread
                await asyncio.sleep(0.01)

        await write(delivery, send_and_hold, abort)

    def call(proxy: RunningProxy) -> httpx2.Response:
        given = {"idempotency-key": "k"}
        with httpx2.stream(
            "POST", f"{proxy.v1}/chat/completions", json={**CHAT, "stream": stream}, headers=given
        ) as reply:
            begun.append(proxy)
            reply.read()
            return reply

    monkeypatch.setattr(Delivery, "_write", write_and_hold)
    num_calls = len(fake_engine.calls)
    with ThreadPoolExecutor(2) as clients:
        calls = [clients.submit(call, proxy) for proxy in (one, other)]
        wait_until(lambda: len(begun if stream else fake_engine.calls[num_calls:]) == 2, "both calls have begun")
        may_end.set()
        replies = [each.result() for each in calls]
    (view,) = one.turns()
    if stream:
        assert sorted("idempotency_key_in_use" in reply.text for reply in replies) == [False, True]
        return
    assert [reply.json()["id"] for reply in replies] == [view.turn.turn_id] * 2
    messages = [*CHAT["messages"], replies[0].json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    assert post(other, {**CHAT, "messages": messages}).status_code == 200
    assert one.turns()[-1].turn.parent_turn_id == view.turn.turn_id


@pytest.mark.parametrize("path", ["/sessions/s/v1", "/v1"])
def test_a_call_extends_the_complete_reply_and_not_an_equal_one_that_was_cut_off(fake_engine, start_proxy, path):
    """One proxy stores a stream whose whole text arrived but not its end, another the complete reply to the retry."""
    one = start_proxy(fake_engine.url)
    other = start_proxy(fake_engine.url, database_url=one.database_url)
    fake_engine.answer(Rule(contains="Hello.", reply=Reply(text="Hi.")))
    whole = post(other, {**CHAT, "stream": True}, url=other.url + "/sessions/count/v1").text.count("data: {")
    fake_engine.fail_next(Fault(kind=FaultKind.RESET_STREAM, after_chunks=whole - 1))
    cut = post(one, {**CHAT, "stream": True}, url=one.url + path)
    assert "engine_unavailable" in cut.text
    reply = post(other, url=other.url + path).json()
    messages = [*CHAT["messages"], reply["choices"][0]["message"], {"role": "user", "content": "on"}]
    last = post(one, {**CHAT, "messages": messages}, url=one.url + path).raise_for_status().json()["id"]
    turns = {view.turn.turn_id: view.turn for view in one.turns() if view.turn.session_id != "count"}
    (aborted,) = (turn for turn in turns.values() if turn.outcome is Outcome.ABORTED)
    assert (aborted.response["content"], turns[reply["id"]].outcome) == ("Hi.", Outcome.EXACT)
    assert turns[last].parent_turn_id == reply["id"]
