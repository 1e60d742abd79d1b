"""The whole demo: build a small model, start the stack, let the agent play and learn, and write a report.

Engine, proxy and trainer are the separate processes that `turnwise up` starts. This driver is only a client, which
plays rollouts no faster than the trainer claims them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field, SecretStr

from turnwise.client import AsyncClient
from turnwise.commands.preflight import load_trainer, needs_of
from turnwise.demo import trail
from turnwise.demo.report import Point, Report
from turnwise.demo.rollouts import CONCURRENT_SESSIONS, Playing, Rollouts, Tasks, load_agent
from turnwise.errors import TurnwiseError
from turnwise.processes.engine_command import num_gpus
from turnwise.processes.ports import free_port
from turnwise.processes.stack import Stack, UpSettings
from turnwise.processes.supervisor import Supervisor
from turnwise.rollouts.pacing import active_policy
from turnwise.settings import Settings, has_sections

POLL_SECONDS = 0.25
"""Interval between checks for a new policy version."""


class DemoSettings(Settings):
    """Settings of the demo."""

    agent: Path = Path("examples/trail/agent.py")
    trainer_config: Path = Path("examples/trail/train.toml")
    out: Path = Path("runs/demo")
    seed: int = 0
    groups_per_batch: int = Field(default=32, ge=1)
    """Groups per policy version, as in the trainer's settings."""
    group_size: int = Field(default=8, ge=2)
    single_sessions: bool = False
    """Play each task once, in a session without a group, and as many sessions as in groups."""
    lead: float = Field(default=2.0, ge=1)
    """Maximum number of batches that are played but not yet trained: one is trained while the next is played."""
    target_reward: float = Field(default=0.94, gt=0, le=1)
    """Mean reward of a batch of new training tasks that starts a held-out evaluation."""
    enough_reward: float = Field(default=0.92, gt=0, le=1)
    """Held-out reward that ends the demo."""
    num_eval_tasks: int = Field(default=256, ge=1)
    max_versions: int = Field(default=60, ge=1)
    """Maximum number of versions; the demo then stops and reports the reward reached."""


class Demo:
    """One run of the demo."""

    world = "trail"
    """The format of the model's warm-up, a key of `small_model.WORLDS`."""
    tasks: Tasks = trail
    """Makes the tasks and grades the answers."""
    title = "An agent learns to follow a trail"
    """Title of the picture."""

    def __init__(self, settings: DemoSettings, say: Any) -> None:
        self._settings = settings
        self._say = say
        self._num_groups = 0
        self._num_evaluations = 0
        self._version = 0
        self._new_version = asyncio.Event()

    async def run(self) -> Report:
        """Run the demo, write the report and return it."""
        settings = self._settings
        settings.out.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        model = await asyncio.to_thread(self._build_model)
        warm_up_seconds = time.monotonic() - started
        with contextlib.ExitStack() as stack:
            client = await asyncio.to_thread(self._start, stack, model)
            started = time.monotonic()
            async with client:
                report = await self._learn(client)
                await self._count(client, report)
            report.seconds = round(time.monotonic() - started, 1)
        report.warm_up_seconds = round(warm_up_seconds, 1)
        report.load_average = os.getloadavg()[1]
        await asyncio.to_thread(report.write, settings.out)
        await self._complete(report)
        return report

    async def _complete(self, report: Report) -> None:
        """Measure what is measured after the stack has ended, and write the report again."""

    def _build_model(self) -> str:
        """Build the model unless it exists; return its directory."""
        from turnwise.demo.small_model import ensure_small_model  # loads torch

        directory = self._settings.out / f"model-{self._settings.seed}"
        return str(ensure_small_model(directory, self._say, self._settings.seed, world=self.world))

    @contextlib.asynccontextmanager
    async def _rollouts(self, client: AsyncClient) -> AsyncIterator[Playing]:
        """Yield the object that plays the agent's sessions."""
        model = (await client.models())[0]["id"]
        agent = load_agent(self._settings.agent)
        yield Rollouts(
            client, agent, model, tasks=self.tasks, seed=self._settings.seed, num_parallel=CONCURRENT_SESSIONS
        )

    def _start(self, stack: contextlib.ExitStack, model: str) -> AsyncClient:
        """Start engine, proxy and trainer on a fresh database; return a client of the proxy."""
        out = self._settings.out
        for name in ("turnwise.db", "turnwise.db-wal", "turnwise.db-shm", "train.jsonl"):
            (out / name).unlink(missing_ok=True)
        up = UpSettings(
            model=model,
            database=SecretStr(f"sqlite:///{out / 'turnwise.db'}"),
            port=free_port(),
            runs_dir=out,
            policies_dir=fresh_directory(out / "policies"),
            trainer_config=self._settings.trainer_config,
        )
        needs = needs_of(load_trainer(up, None))
        config = up.trainer_config if has_sections(self._settings.trainer_config) else None
        children = Stack(up, model=model, gpus=up.gpu_plan(num_gpus()), needs=needs, config=config).children()
        stack.enter_context(Supervisor(children, log_directory=out / "logs", say=self._say))
        return AsyncClient(f"http://127.0.0.1:{up.port}")

    async def _learn(self, client: AsyncClient) -> Report:
        """Play until a held-out evaluation reaches the wanted reward."""
        async with self._rollouts(client) as rollouts:
            return await self._play_until_learnt(client, rollouts)

    async def _play_until_learnt(self, client: AsyncClient, rollouts: Playing) -> Report:
        settings = self._settings
        self._say("demo", f"playing {settings.num_eval_tasks} held-out tasks before any training")
        before = await self._evaluate(rollouts)
        self._say("demo", f"held-out reward before: {before:.2f}")
        report = Report(
            title=self.title, seed=settings.seed, reward_before=before, num_eval_tasks=settings.num_eval_tasks
        )
        async with self._playing(client, rollouts, report):
            while self._version < settings.max_versions:
                await self._next_version()
                if rollouts.tally.mean_reward(settings.groups_per_batch * settings.group_size) < settings.target_reward:
                    continue
                report.reward_after = await self._evaluate(rollouts)
                self._say("demo", f"held-out reward of version {self._version}: {report.reward_after:.2f}")
                if report.reward_after >= settings.enough_reward:
                    break
        report.num_sessions, report.failed_requests = rollouts.tally.num_sessions, rollouts.tally.num_failed
        report.num_policy_versions = self._version
        return report

    async def _evaluate(self, rollouts: Playing) -> float:
        """Play new held-out tasks."""
        count = self._settings.num_eval_tasks
        self._num_evaluations += 1
        return await rollouts.evaluate((self._num_evaluations - 1) * count, count)

    @contextlib.asynccontextmanager
    async def _playing(self, client: AsyncClient, rollouts: Playing, report: Report) -> AsyncIterator[None]:
        """Play training groups and watch the versions in the background; fail as soon as one of them fails.

        Running sessions are completed, because a cancelled call would count as failed.
        """
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._play_groups(rollouts, tasks)),
                tasks.create_task(self._watch(client, rollouts, report)),
            ]
            yield
            rollouts.is_training = False
            for task in background:
                task.cancel()

    async def _play_groups(self, rollouts: Playing, groups: asyncio.TaskGroup) -> None:
        """Start groups, never more than `lead` batches ahead of the trainer."""
        settings = self._settings
        while True:
            while self._num_groups >= (self._version + settings.lead) * settings.groups_per_batch:
                await self._next_version()
            play = rollouts.train_singles if settings.single_sessions else rollouts.train_group
            groups.create_task(play(self._num_groups, settings.group_size))
            self._num_groups += 1

    async def _next_version(self) -> None:
        await self._new_version.wait()

    async def _watch(self, client: AsyncClient, rollouts: Playing, report: Report) -> None:
        """Follow the policy versions and print a line for each."""
        settings = self._settings
        batch = settings.groups_per_batch * settings.group_size
        while True:
            active = await active_policy(client)
            if active is not None and active["version"] > self._version:
                self._version = active["version"]
                staleness = (active["metrics"] or {}).get("staleness_mean")
                point = Point(
                    self._version,
                    rollouts.tally.num_sessions,
                    rollouts.tally.mean_reward(batch),
                    active["reload_seconds"],
                    staleness,
                )
                report.curve.append(point)
                self._say("learn", describe(point))
                self._new_version.set()
                self._new_version = asyncio.Event()
            await asyncio.sleep(POLL_SECONDS)

    async def _count(self, client: AsyncClient, report: Report) -> None:
        """Copy the proxy's own counts to the report."""
        families = text_string_to_metric_families(await client.metrics())
        for sample in (each for family in families for each in family.samples):
            match sample.name:
                case "turnwise_turns_total":
                    outcome = sample.labels["outcome"]
                    report.outcomes[outcome] = report.outcomes.get(outcome, 0) + int(sample.value)
                case "turnwise_refused_total":
                    report.refused[sample.labels["code"]] = int(sample.value)
                case "turnwise_tokens_total" if sample.labels["kind"] == "sampled":
                    report.num_sampled_tokens = int(sample.value)
        report.num_turns = sum(report.outcomes.values())
        report.failed_requests += report.outcomes.get("error", 0) + report.outcomes.get("aborted", 0)
        report.failed_requests += sum(report.refused.values())
        report.reload_pause_seconds_max = max((point.reload_seconds or 0.0 for point in report.curve), default=0.0)


def describe(point: Point) -> str:
    """Return one version's line for the terminal."""
    filled = round(point.reward * 30)
    pause = f"{(point.reload_seconds or 0) * 1000:4.0f} ms"
    stale = "" if point.staleness is None else f"  staleness {point.staleness:.1f}"
    return (
        f"version {point.version:2d}  reward {point.reward:.2f} [{'#' * filled}{'.' * (30 - filled)}]  "
        f"{point.num_sessions:5d} sessions  reload {pause}{stale}"
    )


def fresh_directory(directory: Path) -> Path:
    """Return an empty directory, so that a new database is not used with an old run's policies."""
    import shutil

    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    return directory


def conclude(report: Report, settings: DemoSettings, say: Any) -> int:
    """Print the result and the paths of the output; return the exit status."""
    out = settings.out
    say(
        "demo",
        f"held-out reward {report.reward_before:.2f} → {report.reward_after:.2f}, "
        f"over {report.num_eval_tasks} tasks each",
    )
    say(
        "demo",
        f"{report.num_policy_versions} policy versions, {report.num_sessions} sessions, {report.num_turns} turns, "
        f"{report.num_sampled_tokens} sampled tokens, {report.failed_requests} failed requests",
    )
    say(
        "demo",
        f"{report.warm_up_seconds:.0f} s to build the model, {report.seconds:.0f} s from the start of the engine on",
    )
    say("demo", f"numbers: {out / 'report.json'}   curve: {out / 'learning.png'}   logs: {out / 'logs'}")
    say("demo", f"look inside: turnwise sessions --database sqlite:///{out / 'turnwise.db'}")
    if report.reward_after < settings.enough_reward or report.failed_requests:
        say("demo", f"target missed: at least {settings.enough_reward} held-out reward and no failed request")
        return 1
    return 0


def main(demo: Demo, settings: DemoSettings, say: Any) -> int:
    """Run a demo and return the exit status."""
    report = None
    try:
        report = asyncio.run(demo.run())
    except* TurnwiseError as failures:
        for failure in failures.exceptions:
            say("demo", f"failed: {failure}")
    return 1 if report is None else conclude(report, settings, say)
