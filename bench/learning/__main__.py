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
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from learner import GOOD, POOR, Outcome, learn, serving_teachers, warmed_model
from recipes import CPU_SECONDS, OTHER_CPU_SECONDS, RECIPES, ROOT, TINY_ALONE, TINY_CPU_SECONDS
from tiny import MAX_UPDATES, learn_tiny

from turnwise.types import Json

SEEDS = (0, 1, 2)
TINY_RULE = {name for name, recipe in RECIPES.items() if recipe.num_imported}
"""Recipes with imported sessions that know the tiny task's rule."""
HEADER = ("algorithm", "seed", "held-out", "updates", "sessions", "sampled tokens", "staleness", "CPU s", "")


def main() -> int:
    """Run the chosen algorithms and seeds; print the progress of each run, and a table of all runs."""
    options = _options()
    transformers.utils.logging.disable_progress_bar()
    names = options.algorithm or [
        name for name, recipe in RECIPES.items() if not (recipe.coin if options.tiny else name in TINY_ALONE)
    ]
    seeds = options.seed or list(SEEDS)
    print(_estimate(names, len(seeds), is_tiny=options.tiny), flush=True)
    if options.estimate:
        return 0
    outcomes: list[Outcome] = []
    for name, seed in itertools.product(names, seeds):
        outcomes.append(_run(name, seed, options))
        if options.json:
            document = [dataclasses.asdict(outcome) for outcome in outcomes]
            options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for line in _table(outcomes):
        print(line)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", action="append", choices=list(RECIPES), help="again for more")
    parser.add_argument("--seed", action="append", type=int, help="again for more; by default 0, 1 and 2")
    parser.add_argument("--all", action="store_true", help="every algorithm that was measured on the task")
    parser.add_argument("--tiny", action="store_true", help="the tiny task, seconds of CPU a run, for the demo's")
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=JSON", help="of the trainer")
    parser.add_argument("--max-updates", type=int, help="instead of the recipe's own")
    parser.add_argument("--models", type=Path, default=ROOT / "runs/learning", help="where warmed models are kept")
    parser.add_argument("--estimate", action="store_true", help="print how long the runs will take, and end")
    parser.add_argument("--json", type=Path, help="write the outcomes there, after each run")
    options = parser.parse_args()
    if not options.all and not options.algorithm:
        parser.error("say which --algorithm, or --all")
    if not options.tiny and any(name in TINY_RULE for name in options.algorithm or ()):
        parser.error("imported sessions know the rule of the tiny task alone: add --tiny")
    return options


def _estimate(names: list[str], num_seeds: int, *, is_tiny: bool) -> str:
    """Return how long the runs will take, from earlier runs."""
    each = [TINY_CPU_SECONDS if is_tiny else CPU_SECONDS.get(name, OTHER_CPU_SECONDS) for name in names]
    num_runs, minutes = len(names) * num_seeds, sum(each) * num_seeds / 60
    return f"{num_runs} runs, about {minutes:.0f} CPU minutes on one core"


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _run(name: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Run a recipe, and keep the policy that it trained; first train its teachers, unless earlier runs kept them."""
    recipe = dataclasses.replace(
        RECIPES[name],
        settings=RECIPES[name].settings | dict(options.set),
        max_updates=options.max_updates or RECIPES[name].max_updates,
    )
    taught_by = {} if options.tiny else {each: options.models / f"{each}-{seed}" for each in recipe.taught_by}
    for teacher, kept in taught_by.items():
        if not kept.exists() and not _run(teacher, seed, options).passed:
            raise SystemExit(f"{name} seed {seed} has no teacher: {teacher} seed {seed} has not learnt the task")
    with tempfile.TemporaryDirectory(prefix="turnwise-learning-") as directory:
        if options.tiny:
            max_updates = options.max_updates or MAX_UPDATES
            outcome = learn_tiny(name, recipe, seed, Path(directory), _say, max_updates=max_updates)
        else:
            with serving_teachers(list(taught_by.values())) as teachers:
                outcome = learn(
                    name,
                    recipe,
                    seed,
                    warmed_model(options.models, seed),
                    Path(directory),
                    _say,
                    teachers=teachers,
                    kept=options.models / f"{name}-{seed}",
                )
    wanted = f"at least {GOOD}" if recipe.learns else f"at most {POOR}"
    verdict = "which is" if outcome.passed else "which should be"
    print(f"{name} seed {seed}: {outcome.before:.2f} → {outcome.after:.2f}, {verdict} {wanted}", flush=True)
    return outcome


def _say(outcome: Outcome, metrics: Json) -> None:
    version, held_out = outcome.curve[-1]
    print(
        f"{outcome.name} seed {outcome.seed}  version {version:2d}  held-out {held_out:.2f}"
        f"  entropy {metrics.get('entropy', 0):.2f}  kl {metrics.get('kl', 0):.4f}"
        f"  clipped {metrics.get('clip_fraction', 0):.2f}  staleness {metrics.get('staleness_mean', 0):.1f}",
        flush=True,
    )


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
