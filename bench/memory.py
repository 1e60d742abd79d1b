"""Measure the memory of open sessions: `python bench/memory.py [--sessions 1000] [--soak-seconds 300]`.

`--soak-rate 10` starts at most ten sessions a second in the soak, so that a long soak leaves the machine to other work.

Creates sessions, plays turns in each through a proxy in front of a fake engine, and measures the growth of the resident
memory of the proxy and of its writing process: at most 300 MB together for 10,000 sessions of 20 turns. The limit and
the caches are proportional to the number of sessions. A soak then plays sessions that end, which must not use memory:
the growth since its middle is compared with a limit, because pools grow at its start. Figures are printed as it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import orjson
from servers import Served, proxy_and_engine

LIMIT_BYTES = 300 * 10**6
FULL_SESSIONS = 10_000
CACHE_BYTES = 320 * 2**20
"""The proxy's default; each run gets its share."""
WARM_UP_SESSIONS = 400
"""Pools and caches of fixed size grow until then."""
SOAKED_SESSIONS = 100
"""In one round of the soak."""
SOAK_BYTES = 10 * 10**6
"""Maximum growth in a soak, in which all sessions end; it allows for changes of pools and pages."""
CONCURRENCY = 32
FORGET_EVERY = 50
NUM_PRINTS = 10
JSON = {"content-type": "application/json"}
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
        async with http.post(f"{url}/sessions/{session_id}/v1/chat/completions", data=body, headers=JSON) as response:
            response.raise_for_status()
            reply = orjson.loads(await response.read())
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


async def play_all(
    served: Served, name: str, numbers: Iterable[int], num_turns: int, *, end: bool = False, interval_s: float = 0.0
) -> None:
    """Play many sessions, some concurrently; with `end`, end each session after its turns.

    Sessions start at least `interval_s` after each other.
    """
    places = asyncio.Semaphore(CONCURRENCY)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(number: int) -> None:
            async with places:
                await play(http, served.url, f"{name}-{number}", num_turns)
                if end:
                    (await http.post(f"{served.url}/v1/sessions/{name}-{number}/end", json={})).raise_for_status()
                if number % FORGET_EVERY == 0:  # the fake engine lists all its calls; this memory is not measured
                    (await http.delete(f"{served.engine_url}/fake/calls")).release()

        async with asyncio.TaskGroup() as tasks:
            for number in numbers:
                tasks.create_task(one(number))
                await asyncio.sleep(interval_s)


def fill(served: Served, watched: Watched, num_sessions: int, num_turns: int) -> Grown:
    """Play sessions that stay open; print the growth as it goes, and return it."""
    started, step = time.perf_counter(), max(1, num_sessions // NUM_PRINTS)
    for first in range(0, num_sessions, step):
        last = min(first + step, num_sessions)
        asyncio.run(play_all(served, "memory", range(first, last), num_turns))
        rate = last * num_turns / (time.perf_counter() - started)
        print(f"{last} open sessions of {num_turns} turns: {watched.grown()} ({rate:.0f} calls/s)", flush=True)
    return watched.grown()


def soak(served: Served, watched: Watched, num_turns: int, seconds: float, rate: float) -> Grown:
    """Play sessions that end, at most `rate` a second, or as many as possible for 0.

    Prints the growth as it goes, and returns that of the second half.
    """
    interval_s = 1 / rate if rate else 0.0
    watched.start()
    middle, rounds, started = Grown(0, 0), 0, time.monotonic()
    printed = passed = 0.0
    while passed < seconds:
        sessions = range(SOAKED_SESSIONS)
        asyncio.run(play_all(served, f"soak-{rounds}", sessions, num_turns, end=True, interval_s=interval_s))
        rounds, passed = rounds + 1, time.monotonic() - started
        if passed < seconds / 2:
            middle = watched.grown()
        if passed - printed >= seconds / NUM_PRINTS:
            printed = passed
            print(f"{passed:.0f} s, {rounds * SOAKED_SESSIONS} sessions that ended: {watched.grown()}", flush=True)
    return Grown(*(now - then for now, then in zip(watched.grown(), middle, strict=True)))


def main() -> int:
    """Return 1 if the growth is above the sessions' share of the limit, or if that of the soak's second half is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--soak-seconds", type=float, default=0.0)
    parser.add_argument("--soak-turns", type=int, default=20, help="in each session of the soak")
    parser.add_argument("--soak-rate", type=float, default=0.0, help="sessions a second; 0 is as many as possible")
    given = parser.parse_args()
    share = given.sessions / FULL_SESSIONS
    limit = int(LIMIT_BYTES * share)
    with proxy_and_engine("--cache-bytes", str(int(CACHE_BYTES * share))) as served:
        asyncio.run(play_all(served, "warm", range(WARM_UP_SESSIONS), given.turns))
        watched = Watched(served.pid)
        grown = fill(served, watched, given.sessions, given.turns)
        print(f"{sum(grown) / given.sessions / 1e3:.1f} KB a session; the limit is {limit / 1e6:.0f} MB")
        soaked = Grown(0, 0)
        if given.soak_seconds:
            soaked = soak(served, watched, given.soak_turns, given.soak_seconds, given.soak_rate)
            print(f"in the second half of the soak: {soaked}; the limit is {SOAK_BYTES / 1e6:.0f} MB")
    return 1 if sum(grown) > limit or sum(soaked) > SOAK_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
