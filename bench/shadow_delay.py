"""Measure whether shadow samples delay calls on a real vLLM: `python bench/shadow_delay.py [--rounds 4] [--calls 8]`.

One vLLM serves the demo's model on the CPU. Proxies without shadow samples, with the default share of them, and with
them for every turn take turns in front of it, each in blocks of equal calls: a few agents, each with single-turn
sessions and pauses between them. For every turn and without a bound on their tokens, the engine is busy with shadow
samples in nearly every pause of all agents that is longer than `shadow_idle_seconds`. The pauses are random, with the
median of published agent traces by default. Printed: the latency of the calls, what was sampled beside them, and the
CPU time of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from servers import running

from turnwise.demo.small_model import SmallModelSpec, build_small_model
from turnwise.processes.engine_command import EngineSettings, build_command
from turnwise.processes.stack import command, free_port
from turnwise.store.database import Database

MODEL = "small"
REPLY_TOKENS = 24
MEDIAN_PAUSE = 4.2
"""Time between two turns in the published traces of coding agents that `bench/agents.py` follows, seconds."""
NUM_UNTIMED = 1
"""Calls at the start of a block that are not measured."""
WARM_UP_STEPS = 20
"""Of the model's training: replies have a fixed length, whatever they say."""
WAYS = {
    "without": (),
    "default share": ("--shadow-replies", "3"),
    "every turn": ("--shadow-replies", "3", "--shadow-turns", "1", "--shadow-tokens", "1000"),
}


@dataclasses.dataclass(slots=True)
class Measured:
    """The blocks of one way."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    block_medians: list[float] = dataclasses.field(default_factory=list)
    num_sampled: float = 0.0
    num_interrupted: float = 0.0
    engine_cpu_seconds: float = 0.0


@contextlib.contextmanager
def engine(directory: Path) -> Iterator[tuple[str, int]]:
    """Run vLLM with the demo's model until the block ends; yield its URL and the id of its first process."""
    model = build_small_model(directory / "model", SmallModelSpec(num_warm_up_steps=WARM_UP_STEPS))
    settings = EngineSettings(model=str(model), served_model_name=MODEL, port=free_port(), weight_transfer=False)
    started = build_command(settings, gpu=False)
    variables = [f"{name}={value}" for name, value in started.environment.items()]
    url = f"http://127.0.0.1:{settings.port}"
    with running(["env", *variables, *started.argv], f"{url}/health") as process:
        yield url, process.pid


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all below it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return own + sum(cpu_seconds(child) for child in children)


@contextlib.contextmanager
def proxy(engine_url: str, flags: tuple[str, ...]) -> Iterator[str]:
    """Run a proxy over an empty store until the block ends; yield its URL."""
    with tempfile.TemporaryDirectory(prefix="turnwise-shadow-delay-") as directory:
        database = Database(f"sqlite:///{directory}/bench.db")
        database.upgrade()
        database.close()
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        argv = command("proxy", "--engine", engine_url, "--database", f"sqlite:///{directory}/bench.db", *flags)
        with running([*argv, "--port", str(port), "--log-level", "error"], f"{url}/readyz"):
            yield url


def play(url: str, number: int, num_calls: int, pause: float, seconds: list[float]) -> None:
    """Send an agent's calls one after the other, with pauses; note how long each one took."""
    rng = random.Random(f"agent/{number}")
    http = HTTPConnection(urlsplit(url).netloc, timeout=60)
    for index in range(num_calls):
        time.sleep(rng.uniform(0, 2 * pause))
        message = {"role": "user", "content": f"Follow each boss from {rng.randrange(10**6)}. Which city?"}
        body = {"model": MODEL, "messages": [message], "max_completion_tokens": REPLY_TOKENS, "ignore_eos": True}
        started = time.perf_counter()
        http.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = http.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"the proxy answered {reply.status}: {text[:300]!r}")
        if index >= NUM_UNTIMED:
            seconds.append(time.perf_counter() - started)
    http.close()


def run_block(url: str, options: argparse.Namespace, measured: Measured) -> None:
    """Let the agents play, and add what was measured."""
    seconds: list[float] = []
    agents = [
        threading.Thread(target=play, args=(url, number, options.calls, options.pause, seconds))
        for number in range(options.agents)
    ]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    if len(seconds) != options.agents * (options.calls - NUM_UNTIMED):
        raise RuntimeError("an agent failed; its error is above")
    measured.seconds += seconds
    measured.block_medians.append(statistics.median(seconds))
    with urlopen(f"{url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    found = {
        sample.labels["result"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "turnwise_shadow_turns_total"
    }
    measured.num_sampled += found.get("sampled", 0.0)
    measured.num_interrupted += found.get("interrupted", 0.0)


def main() -> int:
    """Run the blocks in alternation, and print a table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each way")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--calls", type=int, default=8, help="of each agent in a block")
    parser.add_argument("--pause", type=float, default=MEDIAN_PAUSE, help="median between two calls, seconds")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="the first is the base")
    options = parser.parse_args()
    base, *others = options.ways
    found = {way: Measured() for way in options.ways}
    with (
        tempfile.TemporaryDirectory(prefix="turnwise-shadow-delay-") as directory,
        engine(Path(directory)) as (url, pid),
    ):
        for number in range(options.rounds):
            for way in options.ways[:: 1 if number % 2 == 0 else -1]:
                with proxy(url, WAYS[way]) as proxy_url:
                    before = cpu_seconds(pid)
                    run_block(proxy_url, options, found[way])
                    found[way].engine_cpu_seconds += cpu_seconds(pid) - before
    print("| shadow samples | calls | p50 ms | p95 ms | sampled | interrupted | engine CPU s |")
    print("|---|---|---|---|---|---|---|")
    quantiles = {way: statistics.quantiles(each.seconds, n=20) for way, each in found.items()}
    for way, each in found.items():
        p50, p95 = (1000 * quantiles[way][index] for index in (9, 18))
        counts = f"{each.num_sampled:.0f} | {each.num_interrupted:.0f}"
        print(f"| {way} | {len(each.seconds)} | {p50:.1f} | {p95:.1f} | {counts} | {each.engine_cpu_seconds:.0f} |")
    for way in others:
        p50, p95 = (quantiles[way][index] / quantiles[base][index] for index in (9, 18))
        medians = zip(found[way].block_medians, found[base].block_medians, strict=True)
        by_round = " ".join(f"{one / other:.2f}" for one, other in medians)
        print(f"{way} / {base}: p50 {p50:.2f} (by round: {by_round}), p95 {p95:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
