"""Measure how long whole weights take from a trainer's memory to N engines: `python bench/transfers.py`.

Each engine's receiver, and the trainer's server of weights, has a network namespace with an address of its own and a
link that carries `--mbit` each way, on one switch; so it needs root, and Linux's `ip` and `tc`. For each number of
engines: the time until all have a version and how much the trainer's link sent, first with a copy for each, then passed
on from engine to engine. Both are also a multiple of one engine's, of the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import torch

from trainer.features.transfers import HeldVersions
from trainer.features.transfers.server import WeightServer
from turnwise.engine_plugin.receiver import Receiver, TransferInfo

SWITCH, NAME = "tw-switch", "tw-host"
DEADLINE_SECONDS = 600.0


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def address(number: int) -> str:
    return f"10.199.78.{number + 1}"


@contextlib.contextmanager
def hosts(number: int, mbit: int) -> Iterator[list[str]]:
    """Make namespaces whose links carry so much."""
    names = [f"{NAME}-{each}" for each in range(number)]
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for each, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", name, "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", name, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{address(each)}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
            for space, link in ((name, "cable"), (SWITCH, name)):
                limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
                subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", link, *limit], check=True)
        yield names
    finally:
        for name in (*names, SWITCH):
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def num_sent(host: str) -> int:
    """Return the bytes that a host's link has sent."""
    (link,) = json.loads(ip("-n", host, "-s", "-j", "link", "show", "cable"))
    return int(link["stats64"]["tx"]["bytes"])


class Process:
    """This program in another role on a host: it answers each line with one."""

    def __init__(self, running: contextlib.ExitStack, host: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", host, sys.executable, __file__, *arguments]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # these addresses have no names
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, env=quiet, **pipes)
        running.callback(self._process.wait)
        running.callback(self._process.kill)
        self.answer()

    def tell(self, line: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(line), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def be_trainer(num_bytes: int) -> None:
    """Start the transfers that a line asks for, each of so many workers; answer what the engines have to know."""
    server = WeightServer(HeldVersions(), address(0))
    server.held.hold(1, {"weight": torch.arange(num_bytes // 4, dtype=torch.float32)}, None)
    print("null", flush=True)
    for line in sys.stdin:
        started = []
        for num_workers in json.loads(line):
            body = {"version": 1, "num_workers": num_workers}
            started.append(httpx2.post(f"{server.url}/transfers", json=body).json()["init_info"])
        print(json.dumps(started), flush=True)


def be_engine() -> None:
    """Receive what a line tells of; answer once it has arrived whole."""
    receiver = Receiver()
    print("null", flush=True)
    for line in sys.stdin:
        receiver.begin(TransferInfo(**json.loads(line)), 0)
        num_tensors = len(list(receiver.take(1, DEADLINE_SECONDS)))
        print(json.dumps(num_tensors), flush=True)


def measure(names: list[str], trainer: Process, engines: list[Process], *, together: bool) -> tuple[float, int]:
    """Send a version to engines; return the seconds until all have it, and the bytes that the trainer sent."""
    before, began = num_sent(names[0]), time.perf_counter()
    trainer.tell([len(engines)] if together else [1] * len(engines))
    infos = trainer.answer()
    for number, engine in enumerate(engines):
        engine.tell(infos[0] | {"first_rank": 1 + number} if together else infos[number])
    for engine in engines:
        assert engine.answer() == 1
    return time.perf_counter() - began, num_sent(names[0]) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--be", choices=["trainer", "engine"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be is not None:
        torch.set_num_threads(1)
        be_trainer(asked.megabytes * 10**6) if asked.be == "trainer" else be_engine()
        return
    with hosts(1 + max(asked.engines), asked.mbit) as names, contextlib.ExitStack() as running:
        trainer = Process(running, names[0], "--be", "trainer", "--megabytes", str(asked.megabytes))
        engines = [Process(running, name, "--be", "engine") for name in names[1:]]
        measure(names, trainer, engines[:1], together=False)  # what a first transfer allocates
        one = measure(names, trainer, engines[:1], together=False)
        for number in asked.engines:
            for how in ("a copy each", "passed on") if number > 1 else ("a copy each",):
                seconds, sent = measure(names, trainer, engines[:number], together=how == "passed on")
                print(
                    f"{number} engines, {how}: all have {asked.megabytes} MB after {seconds:.2f} s "
                    f"({seconds / one[0]:.2f} x), the trainer sent {sent / 1e6:.0f} MB ({sent / one[1]:.2f} x)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
