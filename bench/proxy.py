"""Measure the overhead of capture: `python bench/proxy.py`.

One run measures the same prepared reply of 600 tokens through the proxy, which commits every turn durably before its
reply is sent, and through a pass-through that records nothing (bench/floor.py). The result is the ratio of the two, so
it depends little on the machine. Prints a table and, with --json, the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from turnwise.processes.stack import command, free_port
from turnwise.processes.supervisor import is_ready
from turnwise.store.database import Database

HERE = Path(__file__).parent
CASES = (("plain", 1), ("plain", 32), ("stream", 1), ("stream", 32))
TARGETS = {("plain", 32): 0.40, ("stream", 32): 0.30}
"""Minimum share of the baseline's throughput."""
P50_SECONDS = 1.5e-3
"""Maximum added latency of a plain call at one connection."""


@contextlib.contextmanager
def running(argv: list[str], url: str) -> Iterator[None]:
    """Run a server until the block ends."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv} did not start")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(30)


def measure(url: str, mode: str, connections: int, seconds: float) -> dict[str, float]:
    """Load one server."""
    argv = [sys.executable, str(HERE / "load.py"), f"{url}/v1/chat/completions", "--connections", str(connections)]
    argv += ["--seconds", str(seconds)] + (["--stream"] if mode == "stream" else [])
    result: dict[str, float] = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    return result


def compare(floor: str, proxy: str, seconds: float, rounds: int) -> list[dict[str, object]]:
    """Measure both alternately, and keep the best round of each."""
    rows: list[dict[str, object]] = []
    for mode, connections in CASES:
        best: dict[str, dict[str, float]] = {}
        for _ in range(rounds):
            for name, url in (("floor", floor), ("proxy", proxy)):
                result = measure(url, mode, connections, seconds)
                if name not in best or result["requests_per_second"] > best[name]["requests_per_second"]:
                    best[name] = result
        ratio = best["proxy"]["requests_per_second"] / best["floor"]["requests_per_second"]
        rows.append({"mode": mode, "connections": connections, **best, "ratio": ratio})
    return rows


def main() -> int:
    """Run the benchmark; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--database", help="a database URL; by default a fresh SQLite file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        database = given.database or f"sqlite:///{directory}/bench.db"
        Database(database).upgrade()
        engine, floor, proxy = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
        port = {url: url.rpartition(":")[2] for url in (engine, floor, proxy)}
        servers.enter_context(
            running([sys.executable, str(HERE / "stand_in.py"), "--port", port[engine]], f"{engine}/v1/models")
        )
        servers.enter_context(
            running(
                [sys.executable, str(HERE / "floor.py"), "--port", port[floor], "--engine", engine],
                f"{floor}/healthz",
            )
        )
        flags = ["--engine", engine, "--engine-check", "off", "--database", database, "--port", port[proxy]]
        servers.enter_context(running(command("proxy", *flags, "--log-level", "warning"), f"{proxy}/readyz"))
        rows = compare(floor, proxy, given.seconds, given.rounds)
    return report(rows, as_json=given.json)


def report(rows: list[dict[str, object]], *, as_json: bool) -> int:
    """Print the rows; return 1 if a target is missed."""
    if as_json:
        print(json.dumps(rows, indent=2))
    missed = 0
    print(f"{'':8}{'connections':>12}{'floor /s':>12}{'proxy /s':>12}{'ratio':>8}{'floor p50':>12}{'proxy p50':>12}")
    for row in rows:
        floor, proxy, ratio = row["floor"], row["proxy"], row["ratio"]
        assert isinstance(floor, dict)
        assert isinstance(proxy, dict)
        assert isinstance(ratio, float)
        missed += ratio < TARGETS.get((str(row["mode"]), int(str(row["connections"]))), 0.0)
        missed += (row["mode"], row["connections"]) == ("plain", 1) and proxy["p50_seconds"] > P50_SECONDS
        print(
            f"{row['mode']!s:8}{row['connections']!s:>12}{floor['requests_per_second']:12.0f}"
            f"{proxy['requests_per_second']:12.0f}{ratio:8.2f}"
            f"{floor['p50_seconds'] * 1e3:9.2f} ms{proxy['p50_seconds'] * 1e3:9.2f} ms"
        )
    print("all targets met" if not missed else f"{missed} targets missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
