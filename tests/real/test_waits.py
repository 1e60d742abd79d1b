"""Every wait has a deadline: a client, a writing process or a body that blocks others is cut off."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from typing import Any

import httpx2
import orjson
import pytest
from support.proxies import RunningProxy
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Reply, Rule

from proxy.http import asgi
from proxy.settings import ProxySettings
from turnwise.errors import TooLarge

BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def chat(proxy: RunningProxy) -> int:
    return httpx2.post(f"{proxy.v1}/chat/completions", json=BODY).status_code


def test_a_stopped_writing_process_fails_its_calls_at_their_deadline_and_is_replaced(fake_engine, start_proxy):
    """Without the deadline, all calls hang while /readyz answers 200."""
    proxy = start_proxy(fake_engine.url, "--commit-timeout-seconds", "1")
    wait_until(lambda: chat(proxy) == 200, "a turn is committed within a second")
    stopped = proxy.writing_process()
    os.kill(stopped, signal.SIGSTOP)
    assert chat(proxy) == 503
    wait_until(lambda: chat(proxy) == 200, "the writing process is replaced")
    assert proxy.writing_process() != stopped


def test_readiness_asks_the_writing_process(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url)
    stopped = proxy.writing_process()
    os.kill(stopped, signal.SIGSTOP)
    try:
        answer = httpx2.get(f"{proxy.url}/readyz")
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert answer.status_code == 503
    assert "writing process has not answered" in answer.json()["store"]


def test_a_client_that_stops_reading_is_disconnected_and_its_slot_is_freed(fake_engine, start_proxy):
    """With one slot, which the engine's call has, and without the deadline, every other call gets 429 forever."""
    proxy = start_proxy(fake_engine.url, "--client-stall-seconds", "2", "--max-concurrent-calls", "1")
    fake_engine.calls.clear()  # the calls of the proxy's probe
    fake_engine.answer(Rule(contains="much", reply=Reply(text="much to read " * 8_000)))
    body = orjson.dumps({"model": "fake", "stream": True, "messages": [{"role": "user", "content": "much"}]})
    address = ("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    with contextlib.closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: fake_engine.calls, "the call has the slot")
        wait_until(lambda: chat(proxy) == 200, "the slot is free again")
    wait_until(lambda: any(view.turn.outcome == "aborted" for view in proxy.turns()), "the aborted turn is stored")


HOSTILE = b'{"messages":[' + b"[]," * (4 * 2**20 // 3) + b"[]]}"


async def test_a_body_of_four_megabytes_of_empty_arrays_is_refused_undecoded_while_the_event_loop_runs(monkeypatch):
    """Decoding it is the longest step in the proxy: it holds the interpreter lock for the whole text."""
    loop_ran, scan = threading.Event(), asgi.scan

    def scan_when_the_loop_has_run(*arguments: Any) -> int:
        assert loop_ran.wait(WAIT_SECONDS)
        return scan(*arguments)

    monkeypatch.setattr(asgi, "scan", scan_when_the_loop_has_run)
    for decoder in ("loads", "decode_by_items"):
        monkeypatch.setattr(asgi, decoder, lambda _: pytest.fail("it is decoded"))
    asyncio.get_running_loop().call_soon(loop_ran.set)
    with pytest.raises(TooLarge, match="more than 32768 arrays and objects"):
        await asgi.parse_object(HOSTILE, ProxySettings().max_json_string_bytes)
