"""The runs of a benchmark, one after another or in several processes; teachers are trained before those they teach."""

from __future__ import annotations

import dataclasses
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import transformers
from learner import GOOD, POOR, Outcome, learn, serving_teachers, warmed_model
from recipes import RECIPES, Recipe
from tiny import MAX_UPDATES, learn_tiny

from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One recipe on one seed."""

    name: str
    seed: int
    models: Path
    """Where warmed models are kept, and the policies that runs have trained."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of the trainer that override the recipe's."""
    max_updates: int | None = None
    """Instead of the recipe's own."""
    is_tiny: bool = False

    @property
    def recipe(self) -> Recipe:
        """The recipe with the job's settings."""
        recipe = RECIPES[self.name]
        return dataclasses.replace(
            recipe, settings=recipe.settings | self.settings, max_updates=self.max_updates or recipe.max_updates
        )

    @property
    def teachers(self) -> dict[str, Path]:
        """The directories of the policies that teach it, by recipe."""
        return {} if self.is_tiny else {name: self.models / f"{name}-{self.seed}" for name in self.recipe.taught_by}


def run_jobs(jobs: Sequence[Job], num_processes: int) -> Iterator[Outcome]:
    """Run the jobs; yield their outcomes, those of taught runs last.

    A missing teacher is trained first, and its outcome is yielded too. A run whose teacher has not learnt the task
    is left out.
    """
    asked = {(job.name, job.seed): job for job in jobs}
    first = {key: job for key, job in asked.items() if not job.teachers}
    for job in jobs:
        for teacher, directory in job.teachers.items():
            if not directory.exists():
                first.setdefault((teacher, job.seed), Job(name=teacher, seed=job.seed, models=job.models))
    for job in first.values():
        if not job.is_tiny:
            warmed_model(job.models, job.seed)  # before the processes, which would build it several times
    yield from _outcomes(list(first.values()), num_processes)
    taught = [job for key, job in asked.items() if key not in first]
    yield from _outcomes([job for job in taught if _has_teachers(job)], num_processes)


def _outcomes(jobs: Sequence[Job], num_processes: int) -> Iterator[Outcome]:
    if num_processes == 1:
        yield from map(run_job, jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # a copy of a process that has used torch can hang
    with ProcessPoolExecutor(num_processes, spawn) as pool:
        yield from pool.map(run_job, jobs)


def _has_teachers(job: Job) -> bool:
    missing = [name for name, directory in job.teachers.items() if not directory.exists()]
    if missing:
        print(f"{job.name} seed {job.seed} is left out: {', '.join(missing)} has not learnt the task", flush=True)
    return not missing


def run_job(job: Job) -> Outcome:
    """Run a recipe, print the progress, and keep the policy that it trained."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="turnwise-learning-") as directory:
        if job.is_tiny:
            most = job.max_updates or (job.recipe.max_updates if job.recipe.explore else MAX_UPDATES)
            outcome = learn_tiny(job.name, job.recipe, job.seed, Path(directory), say, max_updates=most)
        else:
            with serving_teachers(list(job.teachers.values())) as teachers:
                outcome = learn(
                    job.name,
                    job.recipe,
                    job.seed,
                    warmed_model(job.models, job.seed),
                    Path(directory),
                    say,
                    teachers=teachers,
                    kept=job.models / f"{job.name}-{job.seed}",
                )
    wanted = f"at least {GOOD}" if job.recipe.learns else f"at most {POOR}"
    verdict = "which is" if outcome.passed else "which should be"
    print(f"{job.name} seed {job.seed}: {outcome.before:.2f} → {outcome.after:.2f}, {verdict} {wanted}", flush=True)
    return outcome


def say(outcome: Outcome, metrics: Json) -> None:
    """Print an evaluation, and the gauges of the latest batch."""
    version, held_out = outcome.curve[-1]
    print(
        f"{outcome.name} seed {outcome.seed}  version {version:2d}  held-out {held_out:.2f}"
        f"  entropy {metrics.get('entropy', 0):.2f}  kl {metrics.get('kl', 0):.4f}"
        f"  clipped {metrics.get('clip_fraction', 0):.2f}  staleness {metrics.get('staleness_mean', 0):.1f}",
        flush=True,
    )
