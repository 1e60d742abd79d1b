"""Turnwise on a Ray cluster: engines as actors, a trainer by torchrun on several hosts, rollouts as tasks.

    python deploy/ray/fleet.py engines --number 16 --gpus 8 --file /shared/engines.json -- \
        turnwise engine --model /models/policy --tensor-parallel 8 --host {host} --port {port} --allow-remote
    turnwise proxy --engines file:///shared/engines.json
    python deploy/ray/fleet.py train --hosts 2 --gpus 8 -- -m turnwise train --config turnwise.toml --multi-devices
    python deploy/ray/fleet.py rollouts --tasks tasks.jsonl --parts 16 --out /shared/rollouts -- \
        --url http://proxy:8100 --reward-command ./grade.sh -- my-agent "{question}"

Each command runs until its work is done, `engines` until it is ended, and what it started ends with it. `/shared` is a
directory of all nodes. Ray starts an actor again whose process, engine or node has died, on any node with room.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from turnwise.processes.guard import guarded

GRACE_SECONDS = 30.0
"""How long an engine, a trainer or an agent may take to end after its signal."""
WATCH_SECONDS = 2.0
ANSWER_SECONDS = 5.0


def free_address() -> tuple[str, int]:
    """Return this node's address, and a port that is free on it."""
    host = ray.util.get_node_ip_address()
    with socket.create_server((host, 0)) as probe:
        return host, int(probe.getsockname()[1])


@ray.remote(max_restarts=-1)
class Engine:
    """An engine's process, which ends with its actor."""

    def __init__(self, command: Sequence[str]) -> None:
        host, port = free_address()
        self._url = f"http://{host}:{port}"
        argv = [word.replace("{host}", host).replace("{port}", str(port)) for word in command]
        self._process = subprocess.Popen(guarded(argv, GRACE_SECONDS))  # noqa: S603  the operator's command

    def url(self) -> str | None:
        """Return the engine's address, None while it does not answer."""
        if (status := self._process.poll()) is not None:
            sys.stderr.write(f"the engine at {self._url} ended with status {status}; it is started again\n")
            os._exit(1)  # for Ray a failure: it makes the actor again
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=ANSWER_SECONDS):  # noqa: S310  our own address
            return self._url
        return None


def engines(number: int, cpus: float, gpus: float, file: Path, command: Sequence[str]) -> None:
    """Start engines and name those that answer in a file, until this process is ended."""
    made = Engine.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")
    actors = [made.remote(command) for _ in range(number)]
    asked = {actor: actor.url.remote() for actor in actors}
    urls: dict[object, str | None] = dict.fromkeys(actors)
    named: list[str] = []
    while True:
        ready, _ = ray.wait(list(asked.values()), num_returns=number, timeout=WATCH_SECONDS)
        for actor in [each for each, answer in asked.items() if answer in ready]:
            urls[actor] = _answer(asked[actor])
            asked[actor] = actor.url.remote()
        serving = [url for url in urls.values() if url is not None]
        if serving and serving != named:
            replacement = file.with_suffix(".new")
            replacement.write_text(json.dumps(serving), encoding="utf-8")
            replacement.replace(file)
            sys.stderr.write(f"{len(serving)} of {number} engines serve: {', '.join(serving)}\n")
            named = serving
        time.sleep(WATCH_SECONDS)


def _answer(answer: ray.ObjectRef) -> str | None:
    try:
        url: str | None = ray.get(answer)
    except RayError:  # its actor has died, and is made again
        return None
    return url


@ray.remote(max_retries=0)
def run(command: Sequence[str]) -> int:
    """Run a command on a node; return its exit status."""
    return subprocess.run(guarded(command, GRACE_SECONDS), check=False).returncode  # noqa: S603  as above


def train(hosts: int, cpus: float, gpus: int, per_host: int, wait_seconds: float, command: Sequence[str]) -> int:
    """Run torchrun on as many hosts at once; return 0 if it ended well on all of them."""
    group = placement_group([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}] * hosts, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=wait_seconds)
    except ray.exceptions.GetTimeoutError:
        sys.exit(f"no {hosts} nodes with {cpus:g} CPUs and {gpus} GPUs each are free within {wait_seconds:g} s")
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=host) for host in range(hosts)]
    first = ray.remote(free_address).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=places[0])
    host, port = ray.get(first.remote())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts)]
    torchrun += ["--nproc-per-node", str(per_host), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
    torchrun += ["--max-restarts", "3"]
    running = []
    for number, place in enumerate(places):
        # torchrun itself finds no host for its store where a node's own name resolves to loopback, as on Debian.
        asked = [*torchrun, "--rdzv-conf", f"is_host={int(number == 0)}", *command]
        running.append(run.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place).remote(asked))
    try:
        while running:
            (ended,), running = ray.wait(running)
            if status := ray.get(ended):
                return int(status)
        return 0
    finally:
        for each in running:
            ray.cancel(each, force=True)
        remove_placement_group(group)


def rollouts(tasks: Path, parts: int, cpus: float, out: Path, arguments: Sequence[str]) -> int:
    """Play tasks by `turnwise run` on all nodes; return the number of parts that failed twice.

    The same call continues an earlier one, and so does a part whose node has died, because results are in `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in tasks.read_text(encoding="utf-8").splitlines(keepends=True) if line.strip()]
    playing = []
    for number in range(min(parts, len(lines))):
        part = out / f"tasks-{number}.jsonl"
        part.write_text("".join(lines[number::parts]), encoding="utf-8")
        own = ["--tasks", str(part), "--out", str(out / f"part-{number}")]
        played = run.options(num_cpus=cpus, max_retries=3, scheduling_strategy="SPREAD")
        playing.append(played.remote([sys.executable, "-m", "turnwise", "run", *own, *arguments]))
    return sum(status != 0 for status in ray.get(playing))


def main(argv: list[str]) -> int:
    """Run one of the commands of the file's head."""
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description="Turnwise on a Ray cluster")
    parser.add_argument("--address", default="auto", help="the cluster; by default that of this node")
    commands = parser.add_subparsers(dest="command", required=True)
    starts = commands.add_parser("engines")
    starts.add_argument("--number", type=int, required=True)
    starts.add_argument("--file", type=Path, required=True, help="where the engines that serve are named")
    trains = commands.add_parser("train")
    trains.add_argument("--hosts", type=int, required=True)
    trains.add_argument("--per-host", type=int, help="processes of a host; by default as many as GPUs, at least one")
    trains.add_argument("--wait-seconds", type=float, default=600.0, help="for as many free hosts")
    plays = commands.add_parser("rollouts")
    plays.add_argument("--tasks", type=Path, required=True)
    plays.add_argument("--out", type=Path, required=True)
    plays.add_argument("--parts", type=int, required=True)
    for each in (starts, trains, plays):
        each.add_argument("--cpus", type=float, default=1.0, help="of each engine, host or part")
    for each in (starts, trains):
        each.add_argument("--gpus", type=int, default=0, help="of each engine or host")
    given = parser.parse_args(own)
    if not rest:
        parser.error("write after -- what is to be started")
    ray.init(address=given.address)
    if given.command == "engines":
        engines(given.number, given.cpus, given.gpus, given.file, rest)
    if given.command == "train":
        per_host = given.per_host or max(1, given.gpus)
        return train(given.hosts, given.cpus, given.gpus, per_host, given.wait_seconds, rest)
    return rollouts(given.tasks, given.parts, given.cpus, given.out, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
