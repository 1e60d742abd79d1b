"""Run the storm for some minutes on SQLite and on PostgreSQL, then a fleet that changes: `make chaos MINUTES=30`."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from chaos import invariants
from chaos.fleet import fleet, play
from chaos.storm import Storm
from chaos.world import world

KINDS = ("sqlite", "postgresql")
FLEET = "fleet"


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of each part")
    parser.add_argument("--seed", type=int, default=None, help="repeat an earlier run's faults")
    parser.add_argument("--part", choices=(*KINDS, FLEET), action="append", help="all by default")
    parser.add_argument("--agents", type=int, default=200, help="of the fleet")
    parser.add_argument("--engines", type=int, default=16, help="of the fleet")
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one event of the fleet to the next")
    asked = parser.parse_args()
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}: repeat with SEED={seed}", flush=True)
    broken = 0
    for part in asked.part or (*KINDS, FLEET):
        directory = Path(tempfile.mkdtemp(prefix="turnwise-chaos-"))
        if part == FLEET:
            sizes = {"num_agents": asked.agents, "every_seconds": asked.every}
            with fleet(directory, asked.engines) as running:
                violations, summary = play(running, seed, say, seconds=asked.minutes * 60, **sizes)
        else:
            with world(part, directory) as running:
                report = Storm(running, seed, say).run(asked.minutes * 60)
            violations, summary = report.violations, report.summary
        say(summary)
        say(invariants.shortened(violations))
        broken += len(violations)
    return 1 if broken else 0


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
