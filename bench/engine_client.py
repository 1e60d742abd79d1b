"""Compare the proxy's calls to engines with aiohttp's client alone: `python bench/engine_client.py`.

One process holds the client and the server, which sends a stream's next event only once the client has read the one
before, so that both clients get the same parts. Prints CPU microseconds a call with the sending end, the best of some
rounds. Instructions do not depend on other work of the machine: run one client under `valgrind --tool=callgrind` with
two numbers of `--calls`, and divide the difference of its "Collected" by theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import uvloop
from yarl import URL

sys.path.append(sys.path.pop(0))  # bench/proxy.py would be imported instead of the package

from proxy.engines.http_client import HttpClient

PATH = "/v1/chat/completions"
HEADERS = {"content-type": "application/json", "x-request-id": "a" * 32}
REQUEST = b"{%b}" % (b"x" * 2000)
WHOLE = b"x" * 12_000
"""The size of a reply of 100 tokens with logprobs."""
EVENT = b"data: %b\n\n" % (b"x" * 300)
NUM_EVENTS = 100
STREAMED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK, LAST_CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT), b"0\r\n\r\n"
ANSWERED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE)
Read = Callable[[], Awaitable[bytes]]


class Server(asyncio.Protocol):
    """Answers each request at once; the events of a stream are sent by the caller."""

    is_stream = False
    latest: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._received = b""

    def data_received(self, data: bytes) -> None:
        """Answer a request that is complete."""
        self._received += data
        if self._received.endswith(REQUEST):
            self._received, Server.latest = b"", self._transport
            self._transport.write(STREAMED if Server.is_stream else ANSWERED)


async def read_answer(read: Read) -> None:
    """Read one answer to its end."""
    num_bytes = 0
    if Server.is_stream:
        for _ in range(NUM_EVENTS):
            Server.latest.write(CHUNK)
            num_bytes += len(await read())
        Server.latest.write(LAST_CHUNK)
    while part := await read():
        num_bytes += len(part)
    assert num_bytes == (len(EVENT) * NUM_EVENTS if Server.is_stream else len(WHOLE))


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Call with the proxy's client."""
    client = HttpClient(url, connect_seconds=5, silence_seconds=60)

    async def call() -> None:
        with await client.request("POST", PATH, REQUEST, HEADERS) as answer:
            await read_answer(answer.next_part)

    yield call
    await client.close()


@asynccontextmanager
async def theirs(url: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Call with aiohttp's client, without what the proxy's client does not have."""
    target = URL(url + PATH)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=60),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    ) as session:

        async def call() -> None:
            async with session.post(target, data=REQUEST, headers=HEADERS, allow_redirects=False) as answer:
                await read_answer(answer.content.readany)

        yield call


CLIENTS = {"ours": ours, "aiohttp": theirs}


async def measure(client: str, num_calls: int) -> float:
    """Return the CPU seconds of a call."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    async with CLIENTS[client](f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as call:
        for _ in range(5):
            await call()
        before = time.process_time()
        for _ in range(num_calls):
            await call()
        spent = time.process_time() - before
    server.close()
    return spent / num_calls


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", choices=CLIENTS, action="append", help="by default both")
    parser.add_argument("--mode", choices=("whole", "stream"), action="append", help="by default both")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    for mode in given.mode or ("whole", "stream"):
        Server.is_stream = mode == "stream"
        clients = given.client or list(CLIENTS)
        rounds = [[uvloop.run(measure(client, given.calls)) for client in clients] for _ in range(given.rounds)]
        for client, seconds in zip(clients, map(min, zip(*rounds, strict=True)), strict=True):
            print(f"{mode:8}{client:10}{seconds * 1e6:8.0f} µs a call")


if __name__ == "__main__":
    main()
