"""Closed-loop HTTP load over keep-alive connections, in one process: requests per second and latencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from urllib.parse import urlsplit

import uvloop


class Connection(asyncio.Protocol):
    """Sends the next request as soon as the last answer is complete."""

    def __init__(self, request: bytes, until: float, latencies: list[float]) -> None:
        self._request = request
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
        self._transport.write(self._request)

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


async def load(url: str, body: bytes, connections: int, seconds: float) -> dict[str, float]:
    """Return requests per second and the median latency, seconds."""
    parts = urlsplit(url)
    until = time.perf_counter() + seconds
    latencies: list[float] = []
    waiting = []
    for number in range(connections):
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer bench\r\nx-session-id: bench-{number}\r\ncontent-length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda request=request: Connection(request, until, latencies),  # type: ignore[misc]
            parts.hostname,
            parts.port,
        )
        waiting.append(connection.done)
    started = time.perf_counter()
    await asyncio.gather(*waiting)
    spent = time.perf_counter() - started
    return {"requests_per_second": len(latencies) / spent, "p50_seconds": statistics.median(latencies)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    wanted = {"model": "canned", "messages": [{"role": "user", "content": "Say something long."}], "temperature": 1.0}
    payload = json.dumps({**wanted, "stream": given.stream}, separators=(",", ":")).encode()
    print(json.dumps(uvloop.run(load(given.url, payload, given.connections, given.seconds))))
