"""Workers hand connections to each other, so that the requests of a session are served by one of them.

Each worker is a separate server in this process, and the test chooses the worker that a connection reaches.
"""

import asyncio
import contextlib
import functools
import hashlib
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import uvloop
from support.waiting import WAIT_SECONDS
from uvicorn.server import ServerState

from proxy.features.workers.affinity import SessionAffinity, session_name
from proxy.http.connections import LimitedHttp
from proxy.settings import ProxySettings

Run = Callable[[Coroutine[Any, Any, None]], None]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
LONG = b"x" * 900_000
"""Longer than what one read takes from a socket."""


def owned_by(index: int) -> str:
    return next(name for name in map(str, range(100)) if zlib.crc32(name.encode()) % 2 == index)


class Worker:
    def __init__(self, directory: Path, index: int, num_workers: int) -> None:
        self.index = index
        self.num_handed_over = 0
        self.has_handed_over = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.affinity = SessionAffinity(directory, index, num_workers, count=self._count)
        protocol: Any = functools.partial(
            LimitedHttp, ProxySettings(), lambda _: None, lambda _: None, self.affinity.hand_over
        )
        self._config = uvicorn.Config(
            self._answer, http=protocol, interface="asgi3", ws="none", log_config=None, timeout_keep_alive=600
        )
        self._config.load()
        self._protocol, self.state = protocol, ServerState()

    def _count(self) -> None:
        self.num_handed_over += 1
        self.has_handed_over.set()

    async def _answer(self, _scope: Any, receive: Any, send: Any) -> None:
        await self.may_read.wait()
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        answer = f"{self.index} {hashlib.sha256(body).hexdigest()}".encode()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def make_protocol(self, first_data: bytes = b"") -> LimitedHttp:
        return self._protocol(first_data=first_data, config=self._config, server_state=self.state, app_state={})

    async def listen(self) -> int:
        """Serve; return the port."""
        self.server = await asyncio.get_running_loop().create_server(self.make_protocol, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])


@contextlib.asynccontextmanager
async def serving(directory: Path, num_started: int = 2) -> AsyncIterator[tuple[list[Worker], list[str]]]:
    """Yield two workers and their URLs; the first `num_started` take connections."""
    workers = [Worker(directory, index, 2) for index in range(2)]
    urls = [f"http://127.0.0.1:{await worker.listen()}" for worker in workers]
    for worker in workers[:num_started]:
        worker.affinity.start(worker.make_protocol)
    try:
        yield workers, urls
    finally:
        for worker in workers:
            worker.affinity.close()
            worker.server.close()


async def ask(http: aiohttp.ClientSession, url: str, session_id: str, body: bytes) -> int:
    """Send a call; return the number of the worker that answered it, with the whole body."""
    async with http.post(f"{url}/v1/chat/completions", data=body, headers={"x-session-id": session_id}) as response:
        index, digest = (await response.text()).split()
    assert digest == hashlib.sha256(body).hexdigest()
    return int(index)


@LOOPS
@pytest.mark.parametrize("body", [b"{}", LONG], ids=["short", "long"])
def test_every_call_of_a_session_is_answered_by_its_worker(tmp_path, run, body):
    async def scenario() -> None:
        async with serving(tmp_path) as (workers, urls):
            for url in urls:
                connector = aiohttp.TCPConnector(limit=1)
                async with aiohttp.ClientSession(connector=connector) as http:
                    found = [await ask(http, url, owned_by(index), body) for index in (0, 0, 1, 1, 0)]
                assert found == [0, 0, 1, 1, 0]
            # The first connection: to 1 and back to 0. The second, which reaches worker 1: to 0, to 1 and back to 0.
            assert [worker.num_handed_over for worker in workers] == [2, 3]

    run(scenario())


async def hand_over_while_stopping(http: aiohttp.ClientSession, url: str, workers: list[Worker]) -> asyncio.Task[int]:
    """Hand a connection of worker 0 to worker 1, which is busy and then stops; return the request on it."""
    stopping = workers[1].affinity
    asyncio.get_running_loop().remove_reader(stopping._socket.fileno())  # it is busy
    waiting = asyncio.create_task(ask(http, url, owned_by(1), b"{}"))
    await asyncio.wait_for(workers[0].has_handed_over.wait(), WAIT_SECONDS)
    stopping.close()
    return waiting


@LOOPS
def test_connections_that_wait_while_a_worker_stops_are_served(tmp_path, run):
    async def scenario() -> None:
        async with serving(tmp_path) as (workers, urls), aiohttp.ClientSession() as http:
            waiting = await hand_over_while_stopping(http, urls[0], workers)
            assert await waiting == 1
            assert not (tmp_path / "connections-1").exists()

    run(scenario())


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"POST /sessions/s-1/v1/chat/completions HTTP/1.1\r\nX-Session-Id: other", b"s-1"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nX-Session-ID:  s-1 ", b"s-1"),
        (b"POST /v1/messages HTTP/1.1\r\nx-session-id: sub\r\nx-parent-session-id: main", b"main"),
        (b"POST /v1/responses HTTP/1.1\r\nthread-id: t\r\nsession-id: s", b"s"),
        (b"POST /v1/messages HTTP/1.1\r\nx-claude-code-session-id: c", b"c"),
        (b"POST /v1/messages HTTP/1.1\r\nauthorization: Bearer tws-YWJj.AA", b"Bearer tws-YWJj.AA"),
        (b"POST /v1/messages HTTP/1.1\r\nauthorization: Bearer tw-0-key", None),
        (b"GET /v1/sessions/s-1 HTTP/1.1\r\nx-session-id: s-1", None),
    ],
)
def test_the_session_is_named_by_path_header_or_session_key(head, name):
    assert session_name(head + b"\r\n\r\n{}") == name
    assert session_name(head) is None  # the head may go on
