"""Check that each algorithm learns the demo's task: `python bench/learning [--algorithm NAME] [--seed N] [--all]`.

One process plays and trains alternately: sessions, turns and rewards go through the real ledger, batches through the
real claims, workflows and checkpoints; only the engine is replaced by batched sampling in this process. The exit status
is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from jobs import Job, run_jobs
from learner import GOOD, Outcome
from recipes import CPU_SECONDS, OTHER_CPU_SECONDS, RECIPES, ROOT, TINY_ALONE, TINY_CPU_SECONDS

SEEDS = (0, 1, 2)
HEADER = (
    "algorithm",
    "seed",
    "held-out",
    "updates",
    "sessions",
    f"until {GOOD}",
    "sampled tokens",
    "staleness",
    "CPU s",
    "",
)


def main() -> int:
    """Run the chosen algorithms and seeds; print the progress of each run, and a table of all runs."""
    options = _options()
    names = options.algorithm or [
        name for name, recipe in RECIPES.items() if not (recipe.coin if options.tiny else name in TINY_ALONE)
    ]
    seeds = options.seed or list(SEEDS)
    print(_estimate(names, len(seeds), options.jobs, is_tiny=options.tiny), flush=True)
    if options.estimate:
        return 0
    given = {"models": options.models, "settings": dict(options.set), "max_updates": options.max_updates}
    jobs = [Job(name=name, seed=seed, is_tiny=options.tiny, **given) for name, seed in itertools.product(names, seeds)]
    outcomes: list[Outcome] = []
    for outcome in run_jobs(jobs, options.jobs):
        outcomes.append(outcome)
        if options.json:
            document = [dataclasses.asdict(outcome) for outcome in outcomes]
            options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for line in _table(outcomes):
        print(line)
    passed = {(outcome.name, outcome.seed) for outcome in outcomes if outcome.passed}
    return 0 if all((job.name, job.seed) in passed for job in jobs) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", action="append", choices=list(RECIPES), help="again for more")
    parser.add_argument("--seed", action="append", type=int, help="again for more; by default 0, 1 and 2")
    parser.add_argument("--all", action="store_true", help="every algorithm that was measured on the task")
    parser.add_argument("--tiny", action="store_true", help="the tiny task, seconds of CPU a run, for the demo's")
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=JSON", help="of the trainer")
    parser.add_argument("--max-updates", type=int, help="instead of the recipe's own")
    parser.add_argument("--models", type=Path, default=ROOT / "runs/learning", help="where warmed models are kept")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes side by side")
    parser.add_argument("--estimate", action="store_true", help="print how long the runs will take, and end")
    parser.add_argument("--json", type=Path, help="write the outcomes there, after each run")
    options = parser.parse_args()
    if not options.all and not options.algorithm:
        parser.error("say which --algorithm, or --all")
    return options


def _estimate(names: list[str], num_seeds: int, num_processes: int, *, is_tiny: bool) -> str:
    """Return how long the runs will take, from earlier runs."""
    each = [TINY_CPU_SECONDS if is_tiny else CPU_SECONDS.get(name, OTHER_CPU_SECONDS) for name in names]
    num_runs, minutes = len(names) * num_seeds, sum(each) * num_seeds / 60
    return f"{num_runs} runs, about {minutes:.0f} CPU minutes, {minutes / num_processes:.0f} on {num_processes} cores"


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _table(outcomes: list[Outcome]) -> list[str]:
    """Return the rows of a Markdown table."""
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [
        (
            outcome.name,
            str(outcome.seed),
            f"{outcome.before:.2f} → {outcome.after:.2f}",
            str(outcome.num_updates),
            str(outcome.num_sessions),
            str(outcome.num_to_target or ""),
            str(outcome.num_tokens),
            f"{outcome.staleness:.1f}",
            f"{outcome.cpu_seconds:.0f}",
            "" if outcome.passed else "missed",
        )
        for outcome in outcomes
    ]
    return ["| " + " | ".join(row) + " |" for row in rows]


if __name__ == "__main__":
    sys.exit(main())
