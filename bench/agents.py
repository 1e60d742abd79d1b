"""Simulate coding agents: `python bench/agents.py [--agents 400 --seconds 60 --scale 1.0 --pace 1.0]`.

Each agent plays sessions of growing conversations through a proxy that commits every turn, in front of a stand-in. The
sizes follow a published distribution of 391 sessions of coding agents: prompts of 99 k, 413 k and 616 k tokens (p50,
p90, p99), replies of 458, 2,470 and 8,609 tokens, 31 turns a session, and 4.2 s between two turns. `--scale` scales the
tokens and `--pace` the pauses, so that a run also shows where the proxy is saturated. The random numbers are seeded.
Each agent begins in the middle of a session. The figures are of `--seconds` after a warm-up, in which each agent sends
its first turn, whose whole prompt is new: from then on one turn in 31 is a first one.

With `--peer PYTHON`, an interpreter of an environment with `pip install 'litellm[proxy]'`, the same agents then play
through LiteLLM's proxy, which records nothing, in front of the same stand-in.

Printed: turns a second, CPU a turn of the serving and the writing processes, of the agents and of the stand-in, the
time of a call and what the proxy adds to it (without the stand-in's work on the reply) at p50 and p99, the most calls
in flight, how many calls were refused (429) or timed out, and how many calls were answered after they were refused: an
agent waits for the seconds of `Retry-After` and sends the call again. `--max-concurrent-calls` sets the proxy's limit.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from long_text import MANY, Conversation, source_text, tokenizer_directory
from long_turn import HERE, Server, cpu_seconds, process_tree, served
from servers import running

from turnwise.processes.ports import free_port

PROMPT_TOKENS = (20_000, 99_000, 413_000, 616_000)
REPLY_TOKENS = (50, 458, 2_470, 8_609)
QUANTILES = (0.0, 0.5, 0.9, 0.99)
TURNS = 31
PAUSE_SECONDS = 4.2
CHARACTERS_PER_TOKEN = 4
"""Of a tool's result, before scaling."""
FIRST_SHARE = 0.5
"""Of a session's prompt, what its first turn sends; the rest is added turn by turn."""
REFUSED = 429
START_SHARE = 0.75
"""Of the warm-up: when the last agent has started."""


@dataclasses.dataclass
class Seen:
    """What the agents saw."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of each call, by the id of its reply."""
    refused: int = 0
    answered_after_refusal: int = 0
    """Calls that were refused at least once, and answered when they were sent again after `Retry-After`."""
    without_retry_after: int = 0
    timed_out: int = 0
    failed: int = 0
    most_in_flight: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    first_tokens: int = 0
    """Prompt tokens of calls that are the first of their session, and so all new."""


class Load:
    """What all agents share."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.stop = asyncio.Event()
        self.in_flight = 0


def drawn(chance: random.Random, values: tuple[int, ...]) -> int:
    """Return a random size whose quantiles are `values`, linear between them and constant above the last one."""
    at = chance.random()
    above = bisect.bisect_right(QUANTILES, at)
    if above == len(QUANTILES):
        return values[-1]
    low, high = QUANTILES[above - 1], QUANTILES[above]
    return int(values[above - 1] + (values[above] - values[above - 1]) * (at - low) / (high - low))


class Agent:
    """One agent, which plays session after session."""

    def __init__(self, number: int, given: argparse.Namespace, url: str, load: Load) -> None:
        self._number = number
        self._given = given
        self._url = f"{url}/v1/chat/completions"
        self._load = load
        self._chance = random.Random(given.seed * 100_003 + number)
        self._begun = ""

    async def play(self, http: aiohttp.ClientSession) -> None:
        """Play until the load stops; the agents start spread over one pause, or over most of the warm-up."""
        start_seconds = max(PAUSE_SECONDS * self._given.pace, START_SHARE * self._given.warm_up)
        await self._wait(self._chance.random() * start_seconds)
        number, played = 0, self._chance.randrange(TURNS)
        while not self._load.stop.is_set():
            number += 1
            await self._session(http, f"agent-{self._number}-{number}", played)
            played = 0

    async def _wait(self, seconds: float) -> None:
        """Wait for so long, or until the load stops."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._load.stop.wait(), seconds)

    async def _session(self, http: aiohttp.ClientSession, session_id: str, played: int) -> None:
        """Play a session; its first request is as long as after some turns that were played before."""
        tokens = drawn(self._chance, PROMPT_TOKENS) * self._given.scale
        new = max(50, int(tokens * (1 - FIRST_SHARE) / TURNS * CHARACTERS_PER_TOKEN))
        first = int(tokens * (FIRST_SHARE + (1 - FIRST_SHARE) * played / TURNS))
        shape = dataclasses.replace(MANY, num_messages=max(4, first // 600), new_characters=new)
        conversation = Conversation(shape, first * CHARACTERS_PER_TOKEN, self._chance.randrange(10**6))
        for _ in range(played, TURNS):
            if self._load.stop.is_set():
                return
            reply = await self._turn(http, session_id, conversation)
            if reply is not None:
                conversation.extend(reply)
            await self._wait(self._chance.expovariate(1.0) * PAUSE_SECONDS * self._given.pace)

    async def _turn(
        self, http: aiohttp.ClientSession, session_id: str, conversation: Conversation
    ) -> dict[str, Any] | None:
        """Return the reply; None for a call that failed or timed out, or was refused when the load stopped."""
        seen = self._load.seen  # of this moment: a call counts where it begins
        size = max(2, int(drawn(self._chance, REPLY_TOKENS) * self._given.scale))
        body = conversation.request(stream=False, max_tokens=size)
        headers, was_refused = {"content-type": "application/json", "x-session-id": session_id}, False
        while True:
            self._load.in_flight += 1
            seen.most_in_flight = max(seen.most_in_flight, self._load.in_flight)
            started = time.perf_counter()
            try:
                async with http.post(self._url, data=body, headers=headers) as response:
                    raw = await response.read()
            except TimeoutError:
                seen.timed_out += 1
                return None
            finally:
                self._load.in_flight -= 1
            if response.status != REFUSED:
                break
            was_refused = True
            seen.refused += 1
            seen.without_retry_after += "retry-after" not in response.headers
            await self._wait(float(response.headers.get("retry-after", 1)))
            if self._load.stop.is_set():
                return None
        if response.status != 200:
            seen.failed += 1
            return None
        seen.answered_after_refusal += was_refused
        answer = orjson.loads(raw)
        seen.seconds[answer["id"]] = time.perf_counter() - started
        seen.prompt_tokens += len(body) // CHARACTERS_PER_TOKEN
        seen.reply_tokens += size
        if session_id != self._begun:
            self._begun = session_id
            seen.first_tokens += len(body) // CHARACTERS_PER_TOKEN
        if len(seen.seconds) >= self._given.turns:
            self._load.stop.set()
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message


class Peer:
    """Another proxy under measurement: its whole process tree serves."""

    def __init__(self, url: str, pid: int, engine_pid: int, engine_url: str) -> None:
        self.url = url
        self._pid = pid
        self.engine_pid = engine_pid
        self.engine_url = engine_url

    def cpu(self) -> tuple[float, float]:
        """Return the CPU time of its processes, and none of a writing process."""
        return sum(map(cpu_seconds, process_tree(self._pid))), 0.0


@contextlib.contextmanager
def litellm_proxy(python: str) -> Iterator[Peer]:
    """Run LiteLLM's proxy with one worker, in front of the stand-in engine."""
    engine, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        argv = [sys.executable, str(HERE / "long_engine.py"), "--port", str(engine), "--any-ids"]
        stand_in = servers.enter_context(
            running([*argv, "--tokenizer", str(tokenizer_directory())], f"http://127.0.0.1:{engine}/health")
        )
        parameters = {"model": "openai/long", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none"}
        config = Path(directory) / "config.yaml"  # JSON is YAML
        settings = {
            "model_list": [{"model_name": "long", "litellm_params": parameters}],
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},  # on loopback
        }
        config.write_text(json.dumps(settings))
        argv = [str(Path(python).with_name("litellm")), "--config", str(config), "--port", str(port)]
        argv += ["--host", "127.0.0.1", "--num_workers", "1"]
        process = servers.enter_context(running(argv, f"http://127.0.0.1:{port}/health/liveliness"))
        yield Peer(f"http://127.0.0.1:{port}", process.pid, stand_in.pid, f"http://127.0.0.1:{engine}")


async def play_all(server: Server | Peer, given: argparse.Namespace) -> dict[str, Any]:
    """Let all agents play; return the figures of the time after the warm-up."""
    load = Load()
    timeout = aiohttp.ClientTimeout(total=given.timeout)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        agents = [Agent(number, given, server.url, load).play(http) for number in range(given.agents)]
        playing = asyncio.gather(*agents)
        await asyncio.sleep(given.warm_up)
        load.seen = seen = Seen()
        before, started = cpu_times(server), time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(load.stop.wait(), given.seconds)
        num_turns, elapsed = len(seen.seconds), time.monotonic() - started
        spent = {name: seconds - before[name] for name, seconds in cpu_times(server).items()}
        load.stop.set()
        await playing
    engine_seconds = orjson.loads(await asyncio.to_thread(fetch, f"{server.engine_url}/bench/times"))
    added = [seconds - engine_seconds.get(reply, 0.0) for reply, seconds in seen.seconds.items()]
    return {
        "turns": num_turns,
        "ended_turns": len(seen.seconds),
        "turns_per_second": num_turns / elapsed,
        "mean_prompt_tokens": seen.prompt_tokens / max(len(seen.seconds), 1),
        "mean_reply_tokens": seen.reply_tokens / max(len(seen.seconds), 1),
        "mean_first_tokens": seen.first_tokens / max(len(seen.seconds), 1),
        **{f"{name}_cpu_ms": seconds / max(num_turns, 1) * 1e3 for name, seconds in spent.items()},
        "serving_share_of_a_core": spent["serving"] / elapsed,
        "call_mean_ms": statistics.fmean(seen.seconds.values()) * 1e3 if seen.seconds else 0.0,
        **quantiles("call", list(seen.seconds.values())),
        **(proxy_adds := quantiles("added", added)),
        "added_p99_to_p50": proxy_adds["added_p99_ms"] / max(proxy_adds["added_p50_ms"], 1e-3),
        "most_in_flight": seen.most_in_flight,
        "refused": seen.refused,
        "answered_after_refusal": seen.answered_after_refusal,
        "refused_without_retry_after": seen.without_retry_after,
        "timed_out": seen.timed_out,
        "failed": seen.failed,
    }


def fetch(url: str) -> bytes:
    """Return the body of an answer."""
    with urllib.request.urlopen(url) as response:
        body: bytes = response.read()
        return body


def cpu_times(server: Server | Peer) -> dict[str, float]:
    """Return the CPU seconds so far of all that takes part."""
    serving, writer = server.cpu()
    engine = cpu_seconds(server.engine_pid)
    return {"serving": serving, "writer": writer, "agents": time.process_time(), "stand_in": engine}


def quantiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile, milliseconds."""
    found = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [0.0] * 99
    return {f"{name}_p50_ms": found[49] * 1e3, f"{name}_p99_ms": found[98] * 1e3}


def main() -> int:
    """Print the figures; return 1 if a call failed, timed out, or was refused without `Retry-After`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=40.0, help="that are measured")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds before")
    parser.add_argument("--turns", type=int, default=10**9, help="stop after so many turns")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of prompt and reply tokens")
    parser.add_argument("--pace", type=float, default=1.0, help="factor of the pauses between turns")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which an agent gives up a call")
    parser.add_argument("--max-concurrent-calls", type=int, default=1024, help="the proxy's limit")
    parser.add_argument("--workers", type=int, default=1, help="the proxy's serving processes")
    parser.add_argument("--no-session-affinity", action="store_true", help="as the proxy's flag, for several workers")
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter of an environment with litellm[proxy]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    source_text()
    flags = ["--max-concurrent-calls", str(given.max_concurrent_calls)]
    flags += ["--no-session-affinity"] if given.no_session_affinity else []
    with served(*flags, engine_flags=["--any-ids"], num_workers=given.workers) as server:
        figures = uvloop.run(play_all(server, given))
    show("turnwise", figures, as_json=given.json)
    if given.peer:
        with litellm_proxy(given.peer) as peer:
            show("LiteLLM's proxy", uvloop.run(play_all(peer, given)), as_json=given.json)
    return 1 if figures["failed"] or figures["timed_out"] or figures["refused_without_retry_after"] else 0


def show(name: str, figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures of one proxy."""
    if as_json:
        print(json.dumps(figures, indent=2), flush=True)
        return
    print(name + "".join(f"\n  {key:30}{value:12.1f}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
