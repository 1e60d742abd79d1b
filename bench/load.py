"""The load of bench/load.lua in Python, for machines without `wrk`: it takes several times its CPU for each call."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import uvloop

NUM_TURNS = 8
SYSTEM = "You are a careful agent that works step by step. " * 30
TASK = "Do the thing that was asked for, and do it well. " * 10
REPLY = " word" * 100


def requests(host: str, path: str, *, stream: bool, marked: bool) -> Iterator[bytes]:
    """Yield the requests of one connection: sessions of eight turns, each with the whole conversation so far."""
    while True:
        session_id = f"bench-{random.getrandbits(64):016x}"
        named = f"x-session-id: {session_id}\r\n" if marked else ""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Task {session_id}: {TASK}"}]
        for turn in range(2, NUM_TURNS + 2):
            wanted = {"model": "canned", "messages": messages, "temperature": 1.0, "stream": stream}
            yield _request(host, path, json.dumps(wanted, separators=(",", ":")).encode(), named)
            messages += [{"role": "assistant", "content": REPLY}, {"role": "user", "content": f"Now do step {turn}."}]


def _request(host: str, path: str, body: bytes, fields: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nauthorization: Bearer bench\r\n"
        f"{fields}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Sends the next request as soon as the last answer is complete."""

    def __init__(self, requests: Iterator[bytes], until: float, latencies: list[float]) -> None:
        self._requests = requests
        self._until = until
        self._latencies = latencies
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._next()

    def _next(self) -> None:
        self._data = bytearray()
        self._started = time.perf_counter()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        """Count a complete answer."""
        self._data += data
        if not self._is_whole():
            return
        if not self._data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(bytes(self._data[:500]).decode(errors="replace")))
            self._transport.close()
            return
        now = time.perf_counter()
        self._latencies.append(now - self._started)
        if now < self._until:
            self._next()
        else:
            self._transport.close()
            self.done.set_result(None)

    def _is_whole(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._data[:end]).lower()
        at = head.find(b"content-length: ")
        if at >= 0:
            return len(self._data) >= end + 4 + int(head[at + 16 :].split(b"\r\n", 1)[0])
        return self._data.endswith(b"0\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail if the connection closes before the end of the load."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


async def load(
    url: str, connections: int, seconds: float, *, stream: bool = False, marked: bool = True, body: bytes | None = None
) -> dict[str, float]:
    """Return the number of calls, the time they took, and their median latency.

    Each connection plays sessions that grow, or sends the same body again and again if there is one.
    """
    parts = urlsplit(url)
    until = time.perf_counter() + seconds
    latencies: list[float] = []
    waiting = []
    for _ in range(connections):
        if body is None:
            sent = requests(parts.netloc, parts.path, stream=stream, marked=marked)
        else:
            sent = itertools.repeat(_request(parts.netloc, parts.path, body))
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda sent=sent: Connection(sent, until, latencies),  # type: ignore[misc]
            parts.hostname,
            parts.port,
        )
        waiting.append(connection.done)
    started = time.perf_counter()
    await asyncio.gather(*waiting)
    spent = time.perf_counter() - started
    return {"calls": len(latencies), "seconds": spent, "p50_seconds": statistics.median(latencies), "errors": 0}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--unmarked", action="store_true", help="send no session id")
    given = parser.parse_args()
    print(
        json.dumps(
            uvloop.run(
                load(given.url, given.connections, given.seconds, stream=given.stream, marked=not given.unmarked)
            )
        )
    )
