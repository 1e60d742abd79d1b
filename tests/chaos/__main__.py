"""Run the storm for some minutes on SQLite and on PostgreSQL, then a fleet that changes: `make chaos MINUTES=30`."""

import argparse
import contextlib
import secrets
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos import invariants
from chaos.fleet import Fleet, fleet, play
from chaos.storm import Storm
from chaos.world import world

KINDS = ("sqlite", "postgresql")
FLEET = "fleet"
AGENTS_OF_VLLM = 8
"""A CPU's vLLM answers no more of them at once in time for the next event."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of each part")
    parser.add_argument("--seed", type=int, default=None, help="repeat an earlier run's faults")
    parser.add_argument("--part", choices=(*KINDS, FLEET), action="append", help="all by default")
    parser.add_argument("--agents", type=int, default=200, help="of the fleet")
    parser.add_argument("--engines", type=int, default=16, help="of the fleet")
    parser.add_argument("--proxies", type=int, default=2, help="of the fleet")
    parser.add_argument("--real", type=int, default=0, help="vLLMs on the CPU beside the fleet's stand-ins")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one event of the fleet to the next")
    asked = parser.parse_args()
    if asked.agents <= asked.real * AGENTS_OF_VLLM:
        parser.error(f"each vLLM takes {AGENTS_OF_VLLM} of the agents, and some must be left: raise --agents")
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}: repeat with SEED={seed}", flush=True)
    broken = 0
    for part in asked.part or (*KINDS, FLEET):
        directory = Path(tempfile.mkdtemp(prefix="turnwise-chaos-"))
        if part == FLEET:
            violations, summary = play_fleets(directory, seed, asked)
        else:
            with world(part, directory) as running:
                report = Storm(running, seed, say).run(asked.minutes * 60)
            violations, summary = report.violations, report.summary
        say(summary)
        say(invariants.shortened(violations))
        broken += len(violations)
    return 1 if broken else 0


def play_fleets(directory: Path, seed: int, asked: argparse.Namespace) -> tuple[list[str], str]:
    """Play with the stand-ins and with real engines at the same time, which share the agents by a few for each vLLM."""
    num_real_agents = asked.real * AGENTS_OF_VLLM
    parts = [(Fleet, asked.engines, asked.agents - num_real_agents)]
    if asked.real:
        from chaos.real_fleet import RealFleet  # which needs torch

        parts.append((RealFleet, asked.real, num_real_agents))
    given = {"seconds": asked.minutes * 60, "every_seconds": asked.every}
    with contextlib.ExitStack() as running, ThreadPoolExecutor(len(parts)) as pool:
        fleets = [
            running.enter_context(fleet(directory / kind.__name__, size, kind, num_proxies=asked.proxies))
            for kind, size, _ in parts
        ]
        played = [
            pool.submit(play, each, seed, say, num_agents=num_agents, **given)
            for each, (*_, num_agents) in zip(fleets, parts, strict=True)
        ]
        found = [each.result() for each in played]
    return [each for violations, _ in found for each in violations], "\n".join(summary for _, summary in found)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
