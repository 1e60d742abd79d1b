"""One run: agents play, the trainer learns, held-out tasks evaluate it; as in the demo, staleness is one version."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from imported import import_sessions
from in_process import Chain, InProcessProxy
from recipes import DEMO_SETTINGS, ROOT, Recipe, merged
from teacher import serving_policy
from transformers import AutoTokenizer

from examples.demos.plain_agent import load_agent
from proxy.features import Settings as ProxySettings
from proxy.features.pins import Pins
from proxy.sessions.template import load_chat_template
from trainer.features import Settings
from trainer.workflows import OffPolicyWorkflow, OnPolicyWorkflow
from turnwise.default_models import trail
from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.store import rewards, serving
from turnwise.store.database import Database
from turnwise.store.sessions import end_session
from turnwise.types import Json, Reward, Session, Split

AGENT = ROOT / "examples/trail/agent.py"
GROUP_SIZE = 8
GOOD = 0.85
"""Held-out reward that counts as learnt."""
POOR = 0.58
"""Maximum held-out reward of a policy that has learnt no rule: answering at every city and following boss or friend at
random gets (1 + 1/2 + 1/4) / 3. Noise alone moves a policy below it."""
ENOUGH = 0.88
"""A run ends when two evaluations in a row reach this."""
EVALUATE_EVERY = 4
"""Updates between evaluations."""
NUM_EVAL_TASKS = 256
"""Tasks of an evaluation; the final evaluation plays twice as many. Each task is played once, at temperature 1."""


Say = Callable[["Outcome", Json], None]
"""Called after each evaluation with the results of the run so far, and the gauges of the latest batch."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """The results of a run."""

    name: str
    seed: int
    before: float
    """Held-out reward of version 0."""
    after: float = 0.0
    """Held-out reward of the last version, over tasks that no earlier evaluation has used."""
    curve: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """Version and its held-out reward."""
    num_updates: int = 0
    num_sessions: int = 0
    """Number of training sessions."""
    num_to_target: int | None = None
    """Training sessions until those of a batch first had a mean reward of `GOOD`."""
    num_tokens: int = 0
    """Number of tokens sampled in training sessions."""
    staleness: float = 0.0
    """Mean staleness over batches: versions between a turn and the weights that it trains."""
    cpu_seconds: float = 0.0
    """Duration of the run, including evaluations, without the model's warm-up."""
    passed: bool = False


class Run:
    """A ledger, the agents that fill it and the trainer that learns from it."""

    def __init__(self, recipe: Recipe, seed: int, model: Path, directory: Path, teachers: Sequence[Json] = ()) -> None:
        self._recipe, self._seed = recipe, seed
        url = f"sqlite:///{directory / 'ledger.db'}"
        self.db = Database(url)
        self.db.upgrade()
        values = {"database": url, "model": str(model), "policies_dir": directory / "policies"}
        values |= {"progress": False, "wait_seconds": 0.0}
        taught = {"algorithm": {"teachers": list(teachers)}} if teachers else {}
        settings = Settings(**merged(DEMO_SETTINGS, recipe.settings, taught, values))
        workflow = OffPolicyWorkflow if settings.workflow == "off_policy" else OnPolicyWorkflow
        self.workflow = workflow.build_from_config(settings, enable_jit=False)
        self.state = self.workflow.setup(seed)
        if recipe.num_imported:
            is_paired = recipe.settings["algorithm"].get("imitation") == "dpo"
            import_sessions(self.db, model, directory, recipe.num_imported, seed, is_paired=is_paired)
        tokenizer = AutoTokenizer.from_pretrained(model)
        pinned = ProxySettings(sampling_pins={"*": recipe.sampling}, explore=recipe.explore)
        pins = Pins(pinned, lambda _: None)
        self.proxy = InProcessProxy(self.db, load_chat_template(str(model), "string"), tokenizer.decode, seed, pins)
        self.proxy.follow()
        self._play = load_agent(str(AGENT))
        self._coin = random.Random(f"coin/{seed}")
        self._num_tasks = {Split.TRAIN: 0, Split.EVAL: 0}
        self.num_sessions = self.num_tokens = 0
        self.num_to_target: int | None = None

    def play_groups(self) -> None:
        """Play the next training tasks, each with a whole group."""
        tokens = self.proxy.num_sampled_tokens
        count = self._recipe.groups_per_update
        if self._recipe.is_single:
            mean = self._play_tasks(Split.TRAIN, count * GROUP_SIZE, 1)
        else:
            mean = self._play_tasks(Split.TRAIN, count, GROUP_SIZE)
        self.num_sessions += count * GROUP_SIZE
        if mean >= GOOD and self.num_to_target is None:
            self.num_to_target = self.num_sessions
        self.num_tokens += self.proxy.num_sampled_tokens - tokens

    def update(self) -> Json:
        """Train on one batch and serve the new version; return the batch's gauges."""
        metrics, self.state = self.workflow.step(self.state)
        self.workflow.commits.finish_writing()  # the version is read from its directory
        self.proxy.follow()
        return metrics

    def evaluate(self, count: int) -> float:
        """Return the mean reward of new held-out tasks."""
        self._play_tasks(Split.EVAL, count, 1)
        metrics, self.state = self.workflow.evaluate(self.state)
        return float(metrics["reward_mean"])

    def keep_policy(self, directory: Path) -> None:
        """Copy the newest version to a directory, for runs that it teaches."""
        with self.db.read() as conn:
            newest = serving.serving_state(conn).newest
        assert newest is not None, "the trainer publishes version 0 at its start"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(newest.path, directory)

    def close(self) -> None:
        """Close the ledger."""
        self.workflow.close()
        self.db.close()

    def _play_tasks(self, split: Split, count: int, runs: int) -> float:
        """Play new tasks, each some times; return the mean of all rewards."""
        first = self._num_tasks[split]
        self._num_tasks[split] += count
        tasks = [trail.make_task(split.value, first + index, self._seed) for index in range(count) for _ in range(runs)]
        sessions = [self._session(task, number % runs, split, runs) for number, task in enumerate(tasks)]
        chains = self.proxy.open(sessions)
        plays = [
            self._play(self.proxy.client(chain), task.for_agent(), "policy")
            for chain, task in zip(chains, tasks, strict=True)
        ]
        answers = asyncio.run(self.proxy.serve(plays))
        lines = [
            line
            for chain, task, answer in zip(chains, tasks, answers, strict=True)
            for line in self._rewards(chain, task, answer)
        ]
        with self.db.write() as conn:
            rewards.add_rewards(conn, lines)
        for session in sessions:
            with self.db.write() as conn:  # a short transaction: a thread of the trainer writes too
                end_session(conn, session.tenant, session.session_id, "env_done")
        return statistics.fmean(line.value for line in lines)

    def _session(self, task: trail.TrailTask, run: int, split: Split, runs: int) -> Session:
        group = {"credit": self._recipe.credit}
        if not self._recipe.is_single:
            group |= {"group_id": task.task_id, "group_size": runs}
        return Session(
            session_id=f"{task.task_id}-{run}",
            task_id=task.task_id,
            run=run,
            split=split,
            **(group if split is Split.TRAIN else {}),
        )

    def _rewards(self, chain: Chain, task: trail.TrailTask, answer: str) -> list[Reward]:
        """Return the session's rewards; those of held-out sessions are always the true ones."""
        session_id = chain.session.session_id
        if chain.session.split is Split.TRAIN and self._recipe.taught_by:
            return [Reward(session_id=session_id, value=0.0)]
        if chain.session.split is Split.EVAL or not self._recipe.coin:
            return [Reward(session_id=session_id, value=trail.reward(task, answer), source="trail")]
        steps = step_rewards(task, [turn.response for turn in chain.turns])
        lines = [Reward(session_id=session_id, step=step, value=value) for step, value in enumerate(steps)]
        return [*lines, Reward(session_id=session_id, value=float(self._coin.random() < 0.5), source="coin")]


def warmed_model(directory: Path, seed: int) -> Path:
    """Return the demo's model for this seed, built once and kept."""
    return build_small_model(directory / f"model-{seed}", SmallModelSpec(seed=seed))


def step_rewards(task: trail.TrailTask, replies: Sequence[Json]) -> list[float]:
    """Return 1.0 for each reply that looks up the next person on the trail, or answers with its city; else 0.0."""
    people = [task.question.removeprefix("Follow each boss from ").partition(".")[0]]
    while "boss" in (record := task.records[people[-1]]):
        people.append(record["boss"])
    values = []
    for reply in replies:
        calls = [call["function"]["arguments"] for call in reply.get("tool_calls") or []]
        if not calls:
            values.append(trail.reward(task, reply["content"] or ""))
            continue
        right = bool(people) and calls == [json.dumps({"name": people[0]})]
        people = people[1:] if right else people
        values.append(float(right))
    return values


@contextlib.contextmanager
def serving_teachers(directories: Sequence[Path]) -> Iterator[list[Json]]:
    """Serve each policy as the teacher of the tasks with its share of the last digits; yield the setting `teachers`."""
    with contextlib.ExitStack() as stack:
        yield [
            {
                "url": stack.enter_context(serving_policy(directory)),
                "model": directory.name,
                "tasks": f"*[{''.join(str(digit) for digit in range(number, 10, len(directories)))}]",
            }
            for number, directory in enumerate(directories)
        ]


def learn(
    name: str,
    recipe: Recipe,
    seed: int,
    model: Path,
    directory: Path,
    say: Say,
    *,
    teachers: Sequence[Json] = (),
    kept: Path | None = None,
) -> Outcome:
    """Train until two consecutive evaluations are good enough, or until the maximum number of updates.

    Args:
        name: Name of the recipe.
        recipe: The recipe.
        seed: Seed of the tasks, the coin flips, the sampling and the trainer.
        model: Directory of the model after its warm-up.
        directory: An empty directory for the ledger and the versions.
        say: Called with each evaluation.
        teachers: The teachers, as in the trainer's settings.
        kept: Directory to which the last version is copied if it passed.
    """
    torch.set_num_threads(1)
    started = time.process_time()
    run = Run(recipe, seed, model, directory, teachers)
    gc.freeze()  # imported objects never become garbage; scanning them repeatedly takes a quarter of a run
    try:
        outcome = Outcome(name=name, seed=seed, before=run.evaluate(NUM_EVAL_TASKS))
        staleness: list[float] = []
        run.play_groups()
        for number in range(1, recipe.max_updates + 1):
            run.play_groups()  # with the version before the one in training, as with a real trainer
            metrics = run.update()
            staleness.append(metrics.get("staleness_mean", 0.0))
            outcome.num_updates = run.state.progress.policy_version
            if number % EVALUATE_EVERY == 0:
                outcome.curve.append((outcome.num_updates, run.evaluate(NUM_EVAL_TASKS)))
                say(outcome, metrics)
                if recipe.learns and [held_out >= ENOUGH for _, held_out in outcome.curve[-2:]] == [True, True]:
                    break
        outcome.after = run.evaluate(2 * NUM_EVAL_TASKS)
        outcome.passed = outcome.after >= GOOD if recipe.learns else outcome.after <= POOR
        if kept is not None and outcome.passed:
            run.keep_policy(kept)
        outcome.num_sessions, outcome.num_tokens = run.num_sessions, run.num_tokens
        outcome.num_to_target = run.num_to_target
        outcome.staleness = sum(staleness) / len(staleness)
    finally:
        run.close()
        gc.unfreeze()
    outcome.cpu_seconds = time.process_time() - started
    return outcome
