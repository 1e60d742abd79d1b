"""What open sessions cost in memory: `python bench/memory.py`.

Opens sessions, plays turns in each through a proxy in front of a fake engine, and reads how far the proxy's resident
memory grew: at most 300 MB for 10,000 sessions of 20 turns. Fewer sessions get their share of that, and of the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from pathlib import Path

import aiohttp
import orjson
from servers import Served, proxy_and_engine

LIMIT_BYTES = 300 * 10**6
FULL_SESSIONS = 10_000
CACHE_BYTES = 32 * 2**20
"""The settings' defaults."""
WARM_UP_SESSIONS = 200
"""Until then the allocator's own pools grow, whatever comes."""
CONCURRENCY = 32
FORGET_EVERY = 50
TEXT = "The quick brown fox jumps over the lazy dog."


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} is gone")


async def play(http: aiohttp.ClientSession, url: str, session_id: str, num_turns: int) -> None:
    """Play one session, which stays open."""
    messages: list[dict[str, str]] = []
    for number in range(num_turns):
        messages.append({"role": "user", "content": f"{session_id} {number}: {TEXT}"})
        body = orjson.dumps({"model": "fake", "messages": messages})
        async with http.post(f"{url}/sessions/{session_id}/v1/chat/completions", data=body) as response:
            response.raise_for_status()
            reply = orjson.loads(await response.read())
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


async def play_all(served: Served, name: str, num_sessions: int, num_turns: int) -> None:
    """Play many sessions, some at once."""
    places = asyncio.Semaphore(CONCURRENCY)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def one(number: int) -> None:
            async with places:
                await play(http, served.url, f"{name}-{number}", num_turns)
                if number % FORGET_EVERY == 0:  # the fake engine lists every call that it saw, which is not measured
                    (await http.delete(f"{served.engine_url}/fake/calls")).release()

        await asyncio.gather(*(one(number) for number in range(num_sessions)))
    gc.collect()


def main() -> int:
    """Print the growth; return 1 when it is more than the sessions' share of the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=FULL_SESSIONS)
    parser.add_argument("--turns", type=int, default=20)
    given = parser.parse_args()
    share = given.sessions / FULL_SESSIONS
    limit = int(LIMIT_BYTES * share)
    cache = str(int(CACHE_BYTES * share))
    with proxy_and_engine("--replay-bytes", cache, "--token-cache-bytes", cache) as served:
        asyncio.run(play_all(served, "warm", WARM_UP_SESSIONS, given.turns))
        before, started = resident_bytes(served.pid), time.perf_counter()
        asyncio.run(play_all(served, "memory", given.sessions, given.turns))
        grown, seconds = resident_bytes(served.pid) - before, time.perf_counter() - started
    calls = given.sessions * given.turns
    print(
        f"{given.sessions} open sessions of {given.turns} turns: {grown / 1e6:.0f} MB more, "
        f"{grown / given.sessions / 1e3:.1f} KB a session; the limit is {limit / 1e6:.0f} MB "
        f"({calls / seconds:.0f} calls/s)"
    )
    return 1 if grown > limit else 0


if __name__ == "__main__":
    sys.exit(main())
