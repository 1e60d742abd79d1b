"""Measure the overhead of capture: `python bench/proxy.py`.

One run sends the same load through the proxy, which commits every turn durably before its reply ends, and through a
pass-through that records nothing (bench/floor.py): sessions of eight turns that send the conversation so far, from 500
prompt tokens on, with replies of 100 tokens. The results are CPU per call and ratios to the pass-through, so they
depend little on the machine. The load comes from `wrk` (Debian's package `wrk`), or from bench/load.py if that is not
installed; its own CPU is printed too. Prints a table and, with --json, the numbers. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from servers import running

from turnwise.processes.ports import free_port
from turnwise.processes.stack import command
from turnwise.store.database import Database

HERE = Path(__file__).parent
TIMEOUT_SECONDS = 60
SESSIONS_PER_CONNECTION = 4
"""Concurrent sessions of `wrk`, so that a session's turn is answered before its next one is sent."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of load."""

    stream: bool
    connections: int
    marked: bool = True
    """Whether calls name their session."""

    def __str__(self) -> str:
        kind = "stream" if self.stream else "whole"
        return f"{kind}, {self.connections}{'' if self.marked else ', unmarked'}"


CASES = (Case(False, 1), Case(False, 32), Case(False, 32, marked=False), Case(True, 1), Case(True, 32))
MAX_SERVING = {False: 3.0, True: 2.7}
"""Maximum CPU of the serving process, in times the pass-through's, for whole replies and for streams."""
MAX_TOTAL = {False: 4.5}
"""The same with the writing process."""
MAX_UNMARKED = 1.3
"""Maximum CPU of an unmarked call, in times a marked one's."""
MIN_THROUGHPUT = 0.3
"""Minimum share of the pass-through's throughput at 32 connections."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A server under load."""

    url: str
    pid: int
    writer_pid: int | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """One round of load; CPU in seconds per call."""

    calls_per_second: float
    p50_seconds: float
    serving: float
    writer: float
    generator: float

    @property
    def total(self) -> float:
        """CPU of the serving and the writing process."""
        return self.serving + self.writer


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of a process and all its threads."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def writer_of(pid: int) -> int:
    """Return the writing process of a proxy, which has another one that reads weights."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (writer,) = (child for child in children if b"proxy.writer" in Path(f"/proc/{child}/cmdline").read_bytes())
    return int(writer)


def generator(url: str, case: Case, seconds: float) -> list[str]:
    """Return the command that sends the load."""
    wrk = shutil.which("wrk")
    if wrk is None:
        argv = [sys.executable, str(HERE / "load.py"), f"{url}/v1/chat/completions"]
        argv += ["--connections", str(case.connections), "--seconds", str(seconds)]
        return argv + ["--stream"] * case.stream + ["--unmarked"] * (not case.marked)
    argv = [
        wrk,
        "-t1",
        f"-c{case.connections}",
        f"-d{max(1, round(seconds))}s",
        f"--timeout={TIMEOUT_SECONDS}",
        "-s",
        str(HERE / "load.lua"),
        url,
        "--",
    ]
    seed = random.randrange(1 << 31)
    given = (case.stream, case.marked, case.connections * SESSIONS_PER_CONNECTION, seed)
    return argv + [str(argument).lower() for argument in given]


def measure(server: Server, case: Case, seconds: float) -> Measured:
    """Load one server for a while."""
    pids = (server.pid, server.writer_pid)
    before, own_before = [cpu_seconds(pid) for pid in pids], resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(generator(server.url, case, seconds), check=True, capture_output=True, text=True)
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if result["errors"] or not result["calls"]:
        raise RuntimeError(
            f"{result['errors']} of {result['calls']} calls to {server.url} failed; raise --seconds if none ended"
        )
    spent = [cpu_seconds(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    generated = own.ru_utime + own.ru_stime - own_before.ru_utime - own_before.ru_stime
    calls = result["calls"]
    return Measured(
        calls / result["seconds"], result["p50_seconds"], spent[0] / calls, spent[1] / calls, generated / calls
    )


def best(rounds: list[Measured]) -> Measured:
    """Return the best value of each number: other work on the machine only makes them worse."""
    picks: dict[str, Callable[..., float]] = {"calls_per_second": max}
    fields = [field.name for field in dataclasses.fields(Measured)]
    return Measured(**{name: picks.get(name, min)(getattr(each, name) for each in rounds) for name in fields})


def compare(floor: Server, proxy: Server, case: Case, seconds: float, rounds: int) -> tuple[Measured, Measured]:
    """Measure both servers alternately."""
    pairs = [(measure(floor, case, seconds), measure(proxy, case, seconds)) for _ in range(rounds)]
    return best([pair[0] for pair in pairs]), best([pair[1] for pair in pairs])


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
        ports = [str(free_port()) for _ in range(3)]
        engine, floor, proxy = (f"http://127.0.0.1:{port}" for port in ports)
        argv = [sys.executable, str(HERE / "stand_in.py"), "--port", ports[0]]
        servers.enter_context(running(argv, f"{engine}/v1/models"))
        argv = [sys.executable, str(HERE / "floor.py"), "--port", ports[1], "--engine", engine]
        passing = servers.enter_context(running(argv, f"{floor}/healthz"))
        flags = ["--engine", engine, "--engine-check", "off", "--database", database, "--port", ports[2]]
        serving = servers.enter_context(running(command("proxy", *flags, "--log-level", "warning"), f"{proxy}/readyz"))
        pair = Server(floor, passing.pid), Server(proxy, serving.pid, writer_of(serving.pid))
        rows = {case: compare(*pair, case, given.seconds, given.rounds) for case in CASES}
    return report(rows, as_json=given.json)


def report(rows: dict[Case, tuple[Measured, Measured]], *, as_json: bool) -> int:
    """Print the rows; return 1 if a target is missed."""
    if as_json:
        found = {str(case): [dataclasses.asdict(each) for each in pair] for case, pair in rows.items()}
        print(json.dumps(found, indent=2))
    print(f"load: {'wrk' if shutil.which('wrk') else 'bench/load.py'}; CPU in microseconds per call")
    print(f"{'replies, connections':22}{'pass-through':>28}{'proxy':>52}")
    heads = (
        "calls/s",
        "p50 ms",
        "CPU",
        "calls/s",
        "p50 ms",
        "serving",
        "writer",
        "load",
        "serving",
        "total",
        "calls/s",
    )
    print(f"{'':22}" + "".join(f"{head:>9}" for head in heads))
    for case, (floor, proxy) in rows.items():
        shares = (proxy.serving / floor.serving, proxy.total / floor.serving)
        print(
            f"{case!s:22}{floor.calls_per_second:9.0f}{floor.p50_seconds * 1e3:9.2f}{floor.serving * 1e6:9.0f}"
            f"{proxy.calls_per_second:9.0f}{proxy.p50_seconds * 1e3:9.2f}{proxy.serving * 1e6:9.0f}"
            f"{proxy.writer * 1e6:9.0f}{proxy.generator * 1e6:9.0f}{shares[0]:8.2f}x{shares[1]:8.2f}x"
            f"{proxy.calls_per_second / floor.calls_per_second:8.2f}x"
        )
    missed = missed_targets(rows)
    print("\n".join(missed) or "all targets met")
    return 1 if missed else 0


def missed_targets(rows: dict[Case, tuple[Measured, Measured]]) -> list[str]:
    """Return a sentence for each target that is missed at 32 connections."""
    found = []
    for case, (floor, proxy) in rows.items():
        if case.connections == 1 or not case.marked:
            continue
        limits = {
            "CPU of the serving process": (proxy.serving / floor.serving, MAX_SERVING[case.stream]),
            "CPU with the writing process": (proxy.total / floor.serving, MAX_TOTAL.get(case.stream, float("inf"))),
        }
        found += [
            f"missed: {case}: {what} {is_:.2f}x, at most {most}x" for what, (is_, most) in limits.items() if is_ > most
        ]
        share = proxy.calls_per_second / floor.calls_per_second
        if share < MIN_THROUGHPUT:
            found.append(f"missed: {case}: throughput {share:.2f}x, at least {MIN_THROUGHPUT}x")
    unmarked = rows[Case(False, 32, marked=False)][1].total / rows[Case(False, 32)][1].total
    print(f"an unmarked call takes {unmarked:.2f}x the CPU of a marked one")
    if unmarked > MAX_UNMARKED:
        found.append(f"missed: an unmarked call takes {unmarked:.2f}x a marked one, at most {MAX_UNMARKED}x")
    return found


if __name__ == "__main__":
    sys.exit(main())
