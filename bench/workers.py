"""Measure several workers: `python bench/workers.py [--workers 1 2] [--seconds 5] [--database URL]`.

The load of bench/load.py, 32 connections with sessions of eight turns, goes to proxies with different numbers of
workers. Printed for each: calls a second, CPU microseconds a call of all its processes, the time of a commit at p50 and
p99 (the upper bound of its bucket), and how many transactions were tried again because the database was locked. On a
machine with fewer free cores than processes, compare the CPU, not the calls a second.

Then long conversations are played through two workers: over one connection, and over a new connection for each turn,
with session affinity (the worker of the session gets the connection) and without it (half of the turns reach a worker
that does not know the turn before).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

from long_text import MANY, Conversation
from long_turn import CHARACTERS_PER_TOKEN, cpu_seconds, process_tree, served
from prometheus_client.parser import text_string_to_metric_families
from servers import running

from turnwise.processes.stack import command, free_port
from turnwise.store.database import Database

HERE = Path(__file__).parent
CONNECTIONS = 32
WARM_UP_TURNS = 8
"""Enough that both workers know the conversation's first turns."""


class Measured(NamedTuple):
    """The figures of one number of workers."""

    workers: int
    calls_per_second: float
    cpu_us: float
    commit_p50_ms: float
    commit_p99_ms: float
    locked: float


def quantile_ms(buckets: list[tuple[float, float]], share: float) -> float:
    """Return the upper bound of the bucket with this share of the observations, milliseconds."""
    wanted = share * buckets[-1][1]
    return next(bound for bound, count in buckets if count >= wanted) * 1e3


def samples(url: str) -> list[tuple[str, dict[str, str], float]]:
    """Return all metrics' samples."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
        return [(each.name, each.labels, each.value) for family in families for each in family.samples]


def measure(engine: str, database: str, num_workers: int, seconds: float) -> Measured:
    """Load one proxy."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = command("proxy", "--engine", engine, "--engine-check", "off", "--database", database, "--port", str(port))
    with running([*argv, "--workers", str(num_workers), "--log-level", "warning"], f"{url}/readyz") as process:
        for _ in range(2):  # the first round warms up
            pids = process_tree(process.pid)
            before = sum(map(cpu_seconds, pids))
            load = [sys.executable, str(HERE / "load.py"), f"{url}/v1/chat/completions"]
            load += ["--connections", str(CONNECTIONS), "--seconds", str(seconds)]
            done = subprocess.run(load, check=True, capture_output=True, text=True)
            result = json.loads(done.stdout.strip().splitlines()[-1])
            spent = sum(map(cpu_seconds, pids)) - before
        found = samples(url)
    name = "turnwise_commit_seconds_bucket"
    buckets = sorted((float(labels["le"]), value) for each, labels, value in found if each == name)
    locked = sum(value for each, labels, value in found if each == "turnwise_retries_total")
    return Measured(
        num_workers,
        result["calls"] / result["seconds"],
        spent / result["calls"] * 1e6,
        quantile_ms(buckets, 0.5),
        quantile_ms(buckets, 0.99),
        locked,
    )


def cpu_of_turns(num_tokens: int, num_turns: int, *flags: str, reconnects: bool) -> float:
    """Return the CPU milliseconds a turn, of all processes, over one connection or over a new one for each turn."""
    with served("--log-level", "error", *flags, num_workers=2) as server:
        conversation = Conversation(MANY, int(num_tokens * CHARACTERS_PER_TOKEN), 0)
        for number in range(WARM_UP_TURNS + num_turns):
            if number == WARM_UP_TURNS:
                before = sum(server.cpu())
            if reconnects:
                server.reconnect()
            server.turn("conversation", conversation, "whole")
        return (sum(server.cpu()) - before) / num_turns * 1e3


def main() -> int:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, nargs="*", default=[100_000, 300_000], help="of conversations that move")
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--database", help="a database URL; by default a fresh SQLite file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        database = given.database or f"sqlite:///{directory}/bench.db"
        Database(database).upgrade()
        engine_port = free_port()
        engine = f"http://127.0.0.1:{engine_port}"
        argv = [sys.executable, str(HERE / "stand_in.py"), "--port", str(engine_port)]
        servers.enter_context(running(argv, f"{engine}/v1/models"))
        print(f"{'workers':>8}{'calls/s':>9}{'CPU us':>8}{'commit p50':>12}{'p99':>8}{'locked':>8}")
        for num_workers in given.workers:
            row = measure(engine, database, num_workers, given.seconds)
            print(
                f"{row.workers:8}{row.calls_per_second:9.0f}{row.cpu_us:8.0f}{row.commit_p50_ms:9.0f} ms"
                f"{row.commit_p99_ms:5.0f} ms{row.locked:8.0f}",
                flush=True,
            )
    for num_tokens in given.tokens:
        one = cpu_of_turns(num_tokens, given.turns, reconnects=False)
        handed_over = cpu_of_turns(num_tokens, given.turns, reconnects=True)
        moved = cpu_of_turns(num_tokens, given.turns, "--no-session-affinity", reconnects=True)
        print(
            f"{num_tokens} tokens: {one:.1f} ms a turn on one connection, {handed_over:.1f} ms on new connections, "
            f"{moved:.1f} ms on new connections without session affinity"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
