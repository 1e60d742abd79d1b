"""The states of an engine: which transitions are legal, and what a call does in each state."""

import asyncio
import contextlib
import json
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.conversations import new_chain
from support.in_process import in_process_proxy
from support.ports import free_port
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Fault, FaultKind
from turnwise_fake_engine.tokens import write_tokenizer

from proxy.dialects.chat import ChatCompletions
from proxy.engines.engine import MAX_FAILED_CHECKS, Engine, EngineState, without_credentials
from proxy.engines.http_client import Answer
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from turnwise.errors import EngineUnavailable
from turnwise.store.database import Database
from turnwise.types import Session

SESSION = Session(session_id="s")
NO_STORE = Database("sqlite:///never-opened.db")
"""Never opened: no policy is on trial."""


@contextlib.contextmanager
def no_free_files() -> Iterator[None]:
    """Let this process open no file or connection in the block; those that are open stay usable."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("before", [EngineState.READY, EngineState.DRAINING])
async def test_a_reload_restores_the_previous_state_unless_the_engine_was_taken_out(before):
    engine = Engine("http://a", timeout_seconds=1)
    engine.change(EngineState.READY)
    engine.change(before)
    with engine.reloading():
        assert engine.state is EngineState.RELOADING
    assert engine.state is before
    with engine.reloading():
        engine.change(EngineState.ABSENT)
    assert engine.state is EngineState.ABSENT


def make_pool(wait_seconds: float, url: str = "http://a"):
    metrics = Metrics()
    pool = EnginePool([url], metrics, NO_STORE, timeout_seconds=WAIT_SECONDS, wait_seconds=wait_seconds)
    return pool, lambda: metrics.registry.get_sample_value("turnwise_engine_up", {"engine": url})


async def test_a_call_waits_for_an_engine_that_may_return_and_keeps_its_place():
    pool, _ = make_pool(WAIT_SECONDS)
    waiting = asyncio.ensure_future(pool.admit(SESSION))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    pool.engines[0].change(EngineState.READY)
    lane = await asyncio.wait_for(waiting, WAIT_SECONDS)
    assert lane.engine is pool.engines[0]
    pool.release(lane)


async def test_a_call_fails_once_no_engine_came_back_in_time():
    pool, _ = make_pool(0.1)
    with pytest.raises(EngineUnavailable, match="1 engines are known and none is ready"):
        await asyncio.wait_for(pool.admit(SESSION), WAIT_SECONDS)


async def test_a_call_does_not_wait_for_an_unsuitable_engine():
    pool, _ = make_pool(600.0)
    pool.engines[0].change(EngineState.UNSUITABLE)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(pool.admit(SESSION), WAIT_SECONDS)


async def test_a_slow_health_check_does_not_take_an_engine_out_but_several_in_a_row_do(monkeypatch):
    """A listener that accepts and never answers simulates an engine whose event loop is busy."""
    monkeypatch.setattr("proxy.engines.engine.HEALTH_TIMEOUT_SECONDS", 0.05)
    async with SilentServer() as url:
        engine = Engine(url, timeout_seconds=WAIT_SECONDS)
        engine.change(EngineState.READY)
        for _ in range(MAX_FAILED_CHECKS - 1):
            await engine.check_health()
        with pytest.raises(EngineUnavailable):
            await engine.check_health()
        await engine.close()


async def test_slow_health_checks_take_no_engine_out_that_sends_an_answer_meanwhile(monkeypatch):
    """An engine with a long queue is late for its health check, but its streams go on."""
    monkeypatch.setattr("proxy.engines.engine.HEALTH_TIMEOUT_SECONDS", 0.05)

    async def serve(reader, writer):
        if b"/health" in await reader.readline():
            await reader.read()  # until the check ends
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0)
        writer.close()

    async def read(engine):
        with await sent(engine) as answer:
            while await answer.next_part():
                began.set()

    server, began = await asyncio.start_server(serve, "127.0.0.1", 0), asyncio.Event()
    engine = Engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_seconds=WAIT_SECONDS)
    engine.change(EngineState.READY)
    reading = asyncio.create_task(read(engine))
    await asyncio.wait_for(began.wait(), WAIT_SECONDS)
    for _ in range(MAX_FAILED_CHECKS):
        await engine.check_health()
    reading.cancel()
    await asyncio.wait({reading})
    await engine.close()
    server.close()


async def test_a_closed_port_takes_an_engine_out_at_the_first_check():
    async with SilentServer() as url:
        pass
    engine = Engine(url, timeout_seconds=WAIT_SECONDS)
    engine.change(EngineState.READY)
    with pytest.raises(EngineUnavailable):
        await engine.check_health()
    await engine.close()


async def test_a_running_call_ends_when_its_engine_is_detected_as_down(fake_engine, monkeypatch):
    """Without this it would wait for `engine_timeout_seconds`, 600 s by default."""
    fake_engine.fail_next(Fault(kind=FaultKind.HANG))
    monkeypatch.setattr("proxy.engines.engine.GONE_SECONDS", 0.0)
    engine = Engine(fake_engine.url, timeout_seconds=600)
    call = asyncio.ensure_future(sent(engine))
    while not fake_engine.calls:  # noqa: ASYNC110  the engine runs in another thread
        await asyncio.sleep(0.01)
    engine._http._base = "http://127.0.0.1:1"  # from now on the engine does not answer
    with pytest.raises(EngineUnavailable):
        await engine.check_health()
    with pytest.raises(EngineUnavailable, match="has not answered"):
        await asyncio.wait_for(call, WAIT_SECONDS)
    await engine.close()


async def sent(engine: Engine) -> Answer:
    call = ChatCompletions().parse({"messages": [{"role": "user", "content": "Hello."}]})
    call.messages_json = json.dumps(call.messages).encode()
    return await engine.sample(call, new_chain(), "fake", {"content-type": "application/json"})


class SilentServer:
    async def __aenter__(self) -> str:
        self._writers = []
        self._server = await asyncio.start_server(lambda _, writer: self._writers.append(writer), "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
        self._server.close()
        await self._server.wait_closed()


@pytest.mark.parametrize("content", [b"<html>Welcome</html>", b"{}", b'{"data": []}', b'{"data": [3]}', b"[1]"])
async def test_a_server_that_is_no_engine_is_named_with_what_to_do(content):
    """The proxy ended with a traceback at its start."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = Engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_seconds=WAIT_SECONDS)
    with pytest.raises(EngineUnavailable, match=r"answers GET /v1/models with .*; name the address of a vLLM server"):
        await engine.fetch_models()
    await engine.close()
    server.close()


def test_user_and_password_of_an_engine_appear_in_no_address():
    assert without_credentials("http://user:secret@host:8000/base/") == "http://host:8000/base"
    engine = Engine("http://user:secret@host:8000", timeout_seconds=1)
    assert "secret" not in engine.url + str(engine._unavailable(OSError("refused")))


async def test_a_call_for_which_the_proxy_may_open_no_connection_fails_at_once_and_leaves_the_engine_serving():
    """The engine was taken out, and all calls waited for it."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    pool, _ = make_pool(WAIT_SECONDS, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    engine = pool.engines[0]
    engine.change(EngineState.READY)
    with no_free_files(), pytest.raises(EngineUnavailable, match="Too many open files"):
        await asyncio.wait_for(sent(engine), WAIT_SECONDS)
    assert engine.state is EngineState.READY
    await pool.close()
    server.close()


async def test_a_call_that_finds_a_closed_port_takes_the_engine_out_at_once():
    metrics = Metrics()
    urls = [f"http://127.0.0.1:{free_port()}", "http://127.0.0.1:1"]
    pool = EnginePool(urls, metrics, NO_STORE, timeout_seconds=WAIT_SECONDS, wait_seconds=WAIT_SECONDS)
    for engine in pool.engines:
        engine.change(EngineState.READY)
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(sent(pool.engines[0]), WAIT_SECONDS)
    assert pool.serving == [pool.engines[1]]
    await pool.close()


USER = {"role": "user", "content": "Hello."}


def second_turn(directory: Path, **settings: Any) -> dict[str, Any]:
    with in_process_proxy(directory, **settings) as (http, _):
        url = "/sessions/s/v1/chat/completions"
        reply = http.post(url, json={"messages": [USER]}).json()["choices"][0]["message"]
        http.post(url, json={"messages": [USER, reply, USER]}).raise_for_status()
        return dict(http.get("/v1/sessions/s/turns").json()["data"][1])


def test_an_unchecked_engine_is_continued_by_the_template_of_its_directory(tmp_path):
    turn = second_turn(tmp_path)
    assert (turn["outcome"], turn["reason"]) == ("exact", None)


def test_an_unchecked_engine_without_a_template_is_named_at_the_start(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        turn = second_turn(tmp_path, tokenizer=str(tmp_path))
    assert (turn["outcome"], turn["reason"]) == ("retokenised", "template_unknown")
    assert "no turn continues another" in caplog.text


def test_the_engine_renders_where_its_template_is_code(tmp_path):
    """As DeepSeek's: the tokenizer has no template, and the engine's ids after the reply are those that are sent."""
    directory = write_tokenizer(tmp_path / "tokenizer")
    (directory / "chat_template.jinja").unlink()
    turn = second_turn(tmp_path, tokenizer=str(directory), engine_check="strict")
    assert (turn["outcome"], turn["reason"]) == ("exact", None)
