"""How soon a poisoned trainer stops publishing: `python bench/learning/poisoned.py [--json FILE]`.

The demo's task is learnt for some updates, and then the reward's sign is flipped, or the learning rate is multiplied
by 100. The publishing gate has to refuse a version. The exit status is 1 if it refuses none. bench/poisoned.py
publishes bad versions under running calls instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import transformers
from learner import Run, warmed_model
from recipes import RECIPES, ROOT, Recipe

from turnwise.store import versions
from turnwise.types import Json, PolicyStatus

NUM_GATE_SESSIONS = 128
NUM_GOOD_UPDATES = 3
MAX_BAD_UPDATES = 8
FLIPPED = "reward sign flipped"
POISONS = (FLIPPED, "learning rate × 100")
NAMES = ("poison", "refused after", "served before that", "sessions", "held-out", "reason")


def poisoned() -> Iterator[Json]:
    """Poison a run of the demo's task; yield the figures of each poison."""
    model = warmed_model(ROOT / "runs/learning", 0)
    settings = RECIPES["grpo"].settings | {"gate_sessions": NUM_GATE_SESSIONS}
    for poison in POISONS:
        with tempfile.TemporaryDirectory(prefix="turnwise-poisoned-") as directory:
            run = Run(Recipe(settings=settings), 0, model, Path(directory))
            try:
                yield poison_run(run, poison)
            finally:
                run.close()


def flipped(rewards: Mapping[str, float], metadata: Json) -> float:
    """Return the reward with the wrong sign, in the place of `Algorithm.reward`."""
    del metadata
    return -sum(rewards.values())


def poison_run(run: Run, poison: str) -> Json:
    """Train well, then badly until a version is refused; return the figures."""
    run.evaluate(NUM_GATE_SESSIONS)
    for _ in range(NUM_GOOD_UPDATES):
        run.play_groups()
        run.update()
    before = run.evaluate(NUM_GATE_SESSIONS)
    if poison == FLIPPED:
        run.workflow.agent.algorithm.reward = flipped  # type: ignore[method-assign]
    else:
        run.state.schedule.base_rates = [100 * rate for rate in run.state.schedule.base_rates]
    num_served = num_sessions = 0
    seconds, refused = 0.0, None
    while refused is None and num_served < MAX_BAD_UPDATES:
        played = run.num_sessions
        run.play_groups()
        num_sessions += run.num_sessions - played if num_served else 0
        started = time.perf_counter()
        run.update()
        seconds += time.perf_counter() - started
        with run.db.read() as conn:
            (version,), _ = versions.list_versions(conn, limit=1)
        if version.status is PolicyStatus.FAILED:
            refused = version
        else:
            num_served += 1
    return {
        "poison": poison,
        "refused after": f"{num_served + 1} updates, {seconds:.1f} s",
        "served before that": f"{num_served} versions",
        "sessions": num_sessions,
        "held-out": f"{before:.2f} → {run.evaluate(NUM_GATE_SESSIONS):.2f}",
        "reason": refused.error if refused else "",
        "passed": refused is not None,
    }


def main() -> int:
    """Run every poison; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    print(f"| {' | '.join(NAMES)} |\n|{'---|' * len(NAMES)}", flush=True)
    found = []
    for row in poisoned():
        print(f"| {' | '.join(str(row[name]) for name in NAMES)} |", flush=True)
        found.append(row)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["passed"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
