"""Compare what the tests cost with the last release: `make test-cost`, or `python bench/tier_costs.py [--record]`.

Runs tests/unit and tests/contract, whose costs in CPU time tests/support/tiers.py prints, and before and after them a
calibration: a process that does what the tests spend their time on (imports, torch, SQLite). A cost is a number of
calibrations of the same run, so another machine, or a busy one, gives about the same. It is compared, not limited.
`--record` replaces the recorded numbers in bench/tier_costs.json; a release does it.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = Path(__file__).with_suffix(".json")
CALIBRATION = """
import sqlite3

import fastapi, numpy, pydantic, sqlalchemy, torch, transformers

torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(400):
    optimizer.zero_grad()
    model(torch.ones(16, 64)).square().mean().backward()
    optimizer.step()
store = sqlite3.connect(":memory:")
store.execute("CREATE TABLE turns (id INTEGER PRIMARY KEY, name TEXT UNIQUE, body BLOB)")
for number in range(30_000):
    store.execute("INSERT INTO turns (name, body) VALUES (?, ?)", (f"turn-{number}", b"x" * 200))
    store.execute("SELECT body FROM turns WHERE name = ?", (f"turn-{number // 2}",)).fetchone()
"""
COST = re.compile(
    r"^tests/(?P<tier>\w+) took (?P<whole>[\d.]+) s of CPU time|^ +(?P<one>[\d.]+) s of CPU time: (?P<test>.+)$"
)


def calibrated() -> float:
    """Return the CPU seconds of one calibration here and now."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", CALIBRATION], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def costs(workers: int, tiers: Sequence[str]) -> dict[str, float]:
    """Return the CPU seconds of each tier, and of the dearest tests, by name."""
    argv = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *(f"tests/{tier}" for tier in tiers)]
    argv += ["-m", "not slow and not postgres"]
    done = subprocess.run(argv, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nThe tests failed, so their costs mean nothing: make `make test` pass first.")
    found = [match for match in map(COST.match, done.stdout.splitlines()) if match is not None]
    return {each["tier"] or each["test"]: float(each["whole"] or each["one"]) for each in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--tiers", nargs="+", default=["unit", "contract"])
    parser.add_argument("--record", action="store_true", help="replace the recorded numbers")
    given = parser.parse_args()
    before, seconds, after = calibrated(), costs(given.workers, given.tiers), calibrated()
    unit = (before + after) / 2
    print(f"one calibration took {before:.2f} s of CPU time before the tests, {after:.2f} s after them")
    measured = {name: round(spent / unit, 2) for name, spent in seconds.items()}
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for name, cost in measured.items():
        known = f"{cost / recorded[name]:.2f} of the last release's" if recorded.get(name) else "not recorded"
        print(f"{cost:8.2f} calibrations ({seconds[name]:.1f} s), {known}: {name}")
    if given.record:
        RECORDED.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
