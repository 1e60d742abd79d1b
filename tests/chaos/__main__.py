"""Run the storm for some minutes on SQLite and on PostgreSQL: `make chaos MINUTES=30`."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from chaos import invariants
from chaos.storm import Storm
from chaos.world import world

KINDS = ("sqlite", "postgresql")


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="on each database")
    parser.add_argument("--seed", type=int, default=None, help="repeat an earlier run's faults")
    parser.add_argument("--database", choices=KINDS, action="append", help="both by default")
    asked = parser.parse_args()
    seed = secrets.randbelow(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}: repeat with SEED={seed}", flush=True)
    broken = 0
    for kind in asked.database or KINDS:
        with world(kind, Path(tempfile.mkdtemp(prefix="turnwise-chaos-"))) as running:
            report = Storm(running, seed, lambda line: print(line, flush=True)).run(asked.minutes * 60)
        print(report.summary)
        print(invariants.shortened(report.violations))
        broken += len(report.violations)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
