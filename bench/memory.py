"""Measure the memory of open sessions: `python bench/memory.py [--soak-seconds 300]`.

Creates sessions, plays turns in each through a proxy in front of a fake engine, and measures the growth of the resident
memory of the proxy and of its writing process: at most 300 MB together for 10,000 sessions of 20 turns. The limit and
the caches are proportional to the number of sessions. A soak then plays sessions that end, which must not use memory.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import orjson
from servers import Served, proxy_and_engine

LIMIT_BYTES = 300 * 10**6
FULL_SESSIONS = 10_000
CACHE_BYTES = 32 * 2**20
"""The settings' defaults."""
WARM_UP_SESSIONS = 200
"""The allocator's own pools grow until then."""
SOAK_BYTES = 10 * 10**6
"""Maximum growth in a soak, in which all sessions end; it allows for changes of pools and pages."""
CONCURRENCY = 32
FORGET_EVERY = 50
TEXT = "The quick brown fox jumps over the lazy dog."


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} does not exist")


class Grown(NamedTuple):
    """Growth of the two processes, bytes."""

    proxy: int
    writer: int

    def __str__(self) -> str:
        return (
            f"{(self.proxy + self.writer) / 1e6:.0f} MB more "
            f"(the proxy {self.proxy / 1e6:.0f}, its writing process {self.writer / 1e6:.0f})"
        )


class Watched:
    """A proxy and its only child, the writing process."""

    def __init__(self, pid: int) -> None:
        threads = Path(f"/proc/{pid}/task").iterdir()
        (writer,) = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        self._pids = (pid, writer)
        self.start()

    def start(self) -> None:
        """Start the measurement."""
        self._before = [resident_bytes(pid) for pid in self._pids]

    def grown(self) -> Grown:
        """Return the growth since the start."""
        return Grown(*(resident_bytes(pid) - before for pid, before in zip(self._pids, self._before, strict=True)))


async def play(http: aiohttp.ClientSession, url: str, session_id: str, num_turns: int) -> None:
    """Play one session and leave it open."""
    messages: list[dict[str, str]] = []
    for number in range(num_turns):
        messages.append({"role": "user", "content": f"{session_id} {number}: {TEXT}"})
        body = orjson.dumps({"model": "fake", "messages": messages})
        async with http.post(f"{url}/sessions/{session_id}/v1/chat/completions", data=body) as response:
            response.raise_for_status()
            reply = orjson.loads(await response.read())
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


async def play_all(served: Served, name: str, num_sessions: int, num_turns: int, *, end: bool = False) -> None:
    """Play many sessions, some concurrently; with `end`, end each session after its turns."""
    places = asyncio.Semaphore(CONCURRENCY)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(number: int) -> None:
            async with places:
                await play(http, served.url, f"{name}-{number}", num_turns)
                if end:
                    (await http.post(f"{served.url}/v1/sessions/{name}-{number}/end", json={})).raise_for_status()
                if number % FORGET_EVERY == 0:  # the fake engine lists all its calls; this memory is not measured
                    (await http.delete(f"{served.engine_url}/fake/calls")).release()

        await asyncio.gather(*(one(number) for number in range(num_sessions)))


def soak(served: Served, num_turns: int, seconds: float) -> int:
    """Play sessions that end, for some seconds; return their number."""
    rounds, stop = 0, time.monotonic() + seconds
    while time.monotonic() < stop:
        asyncio.run(play_all(served, f"soak-{rounds}", WARM_UP_SESSIONS, num_turns, end=True))
        rounds += 1
    return rounds * WARM_UP_SESSIONS


def main() -> int:
    """Print the growth; return 1 if it is above the sessions' share of the limit, or if the soak's is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=FULL_SESSIONS)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--soak-seconds", type=float, default=0.0)
    given = parser.parse_args()
    share = given.sessions / FULL_SESSIONS
    limit = int(LIMIT_BYTES * share)
    cache = str(int(CACHE_BYTES * share))
    with proxy_and_engine("--replay-bytes", cache, "--token-cache-bytes", cache) as served:
        asyncio.run(play_all(served, "warm", WARM_UP_SESSIONS, given.turns))
        watched, started = Watched(served.pid), time.perf_counter()
        asyncio.run(play_all(served, "memory", given.sessions, given.turns))
        grown, seconds = watched.grown(), time.perf_counter() - started
        print(
            f"{given.sessions} open sessions of {given.turns} turns: {grown}, "
            f"{sum(grown) / given.sessions / 1e3:.1f} KB a session; the limit is {limit / 1e6:.0f} MB "
            f"({given.sessions * given.turns / seconds:.0f} calls/s)"
        )
        watched.start()
        num_soaked = soak(served, given.turns, given.soak_seconds)
        soaked = watched.grown()
        if num_soaked:
            print(f"{given.soak_seconds:.0f} s more, of {num_soaked} sessions that end: {soaked}")
    return 1 if sum(grown) > limit or sum(soaked) > SOAK_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
