"""The course of every demo: builds a model, starts the stack, plays, follows versions, and grades held-out tasks.

The stack is one `turnwise up`, and all sessions are played by `turnwise run`. This driver starts these commands,
follows the policy versions over HTTP, and reads the results that `turnwise run` records.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from examples.demos import plain_agent
from examples.demos.plain_agent import Split
from examples.demos.report import Point, Report, RunReport, count_failures, margin, mean_reward
from examples.demos.terminal import Advance, Terminal
from turnwise.client import AsyncClient
from turnwise.commands import place
from turnwise.commands.flags import SettingsCommand
from turnwise.default_models import trail
from turnwise.errors import RolloutFailed, TurnwiseError
from turnwise.processes.limited import run_limited
from turnwise.processes.ports import free_port
from turnwise.processes.stack import UpSettings, command
from turnwise.processes.supervisor import Child, Supervisor, tail_of
from turnwise.processes.terminal import Say
from turnwise.rewards import grader
from turnwise.rollouts.results import RunResult, is_failed, read_results
from turnwise.rollouts.runner import POLL_SECONDS, active_policy
from turnwise.settings import Settings, has_sections
from turnwise.types import Json

SESSION_SECONDS = 600.0
"""After which a session has failed: a crowded machine plays 32 at a time in minutes."""
MAX_FAILED_SESSIONS = 5
"""Number of failed sessions after which the demo ends with the last session's error."""
SPARE_TASKS = 4
"""Training tasks to each that is expected: further groups take the place of groups with equal rewards."""
UP_SECONDS = 45.0
"""How long `turnwise up` may take to end its processes."""
BLOCK = 32
"""Held-out tasks that are played at once; after them it is decided whether more are needed."""
SHOWN_CHARACTERS = 80
RUN_SECONDS = SESSION_SECONDS + 60.0
"""How long `turnwise run` may take to end: each session has its whole time, because a call that is cut off failed."""


class DemoSettings(Settings):
    """Settings of the demo."""

    agent: Path = Path("examples/trail/agent.py")
    trainer_config: Path = Path("examples/trail/train.toml")
    out: Path = Path("runs/demo-small")
    seed: int = 0
    groups_per_batch: int = Field(default=32, ge=1)
    """Groups per policy version, as in the trainer's settings."""
    group_size: int = Field(default=8, ge=2)
    single_sessions: bool = False
    """Play each task once, in a session without a group, and as many sessions as in groups."""
    lead: float = Field(default=2.0, ge=1)
    """Maximum number of batches that are played but not yet trained: one is trained while the next is played."""
    target_reward: float = Field(default=0.94, gt=0, le=1)
    """Mean reward of a batch of new training tasks that ends the training for a held-out evaluation."""
    enough_reward: float = Field(default=0.92, gt=0, le=1)
    """Held-out reward that the demo must reach."""
    num_eval_tasks: int = Field(default=256, ge=1)
    """Maximum number of held-out tasks of each measurement."""
    eval_margin: float = Field(default=0.1, gt=0)
    """Half of the 95 % interval of a held-out reward at which no further tasks are played."""
    thorough: bool = False
    """Play all held-out tasks. A pretrained model also plays them greedily, and what it forgot is measured."""
    stay: bool = False
    """Serve the trained model after the demo, until ctrl-C."""
    max_versions: int = Field(default=60, ge=1)
    """Maximum number of versions; the demo then stops and reports the reward reached."""

    def missed(self, report: Any) -> str | None:
        """Return the target if the run of this report missed it by more than its interval."""
        if report.reward_after + report.margin_after >= self.enough_reward and not report.failed_requests:
            return None
        return f"at least {self.enough_reward} held-out reward and no failed request"


AnySettings = TypeVar("AnySettings", bound=DemoSettings)


class Demo:
    """One run of the demo."""

    warm_up = trail.WARM_UP
    tasks = trail.__name__
    """The module that makes the tasks and grades the answers, for `plain_agent`."""
    options: Mapping[str, Any] = {}
    """Further arguments of its `make_task`."""
    call = f"{plain_agent.__name__}:play"
    """The function that `turnwise run` calls for each run."""
    python = sys.executable
    """Interpreter of the agent's environment."""
    num_parallel = 64
    """Sessions that are played at once. More do not increase the small engine's load."""
    plays_held_out_once = False
    """The held-out reward decides nothing; by default a low one lets the training go on."""
    is_control = False
    """There is nothing to learn: the run ends with its training tasks, whatever they earn."""
    title = "An agent learns to follow a trail"
    """Title of the picture."""

    def __init__(self, settings: DemoSettings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._proxy = f"http://127.0.0.1:{free_port()}"
        self._logs = settings.out / "logs"
        self._page = ""
        self._version = 0
        self._has_played_all = False
        self._model = ""
        self.example: list[str] = []
        """One task before and after the training, as lines for the terminal."""

    def _doing(self, text: str, total: int | None = None) -> contextlib.AbstractContextManager[Advance]:
        """Show on the terminal what is being done until the block ends."""
        say = self._say
        return say.doing(text, total) if isinstance(say, Terminal) else contextlib.nullcontext(lambda _: None)

    async def run(self) -> RunReport:
        """Run the demo, write the report and return it."""
        started = time.monotonic()
        fresh(self._settings.out, ("turnwise.db", "turnwise.db-wal", "turnwise.db-shm", "policies", "rollouts"))
        with self._doing("building the model and the tasks"):
            self._model = await asyncio.to_thread(self._build_model)
            key = await asyncio.to_thread(self._prepare)
        warm_up_seconds = time.monotonic() - started
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            with self._doing("starting engine, proxy and trainer"):
                up = await asyncio.to_thread(stack.enter_context, self._stack())
            key = key or place.stored_key()
            self._page = f"{self._proxy}/#key={key}"
            self._say("demo", f"the page is {self._page}")
            async with AsyncClient(self._proxy, api_key=key) as client:
                report = await self._learn(client, up)
            report.seconds = round(time.monotonic() - started, 1)
            if self._settings.stay:
                await self._stay(up)
            with self._doing("stopping engine, proxy and trainer"):
                await asyncio.to_thread(stack.close)
        report.warm_up_seconds = round(warm_up_seconds, 1)
        report.load_average = os.getloadavg()[1]
        await self._complete(report)
        with self._doing("drawing the picture"):
            await asyncio.to_thread(report.write, self._settings.out)
        return report

    async def _stay(self, up: Supervisor) -> None:
        """Leave the stack as it is until somebody ends the demo."""
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        self._say("demo", f"served until ctrl-C: base_url {self._proxy}/v1, page {self._page}")
        with self._doing("serving"):
            while not stopped.is_set():
                up.check()
                await asyncio.sleep(POLL_SECONDS)

    def next_steps(self) -> list[str]:
        """Return what to do after the demo: serve the model, call it, reward it."""
        proxy = "http://127.0.0.1:8100"
        body = '{"turn_id": "chatcmpl-…", "value": 1}'
        key = f'-H "authorization: Bearer $(cat {place.KEY_FILE})"'
        return [
            f"serve it    {shlex.join(['turnwise', 'up', '--model', self._model, *self._places()])}",
            f'your agent  OpenAI(base_url="{proxy}/v1", api_key="none")',
            f"a reward    curl {proxy}/v1/rewards -H 'content-type: application/json' {key} -d '{body}'",
        ]

    def _prepare(self) -> str | None:
        """Write what the stack does not make; return the demo's own key of the proxy, None where it has no keys."""
        self._write_tasks()
        return None

    async def _complete(self, report: Any) -> None:
        """Measure what is measured after the stack has ended."""

    def _build_model(self) -> str:
        """Build the model unless it exists; return its directory."""
        from turnwise.default_models.small_model import ensure_small_model  # loads torch

        directory = self._settings.out / f"model-{self._settings.seed}"
        return str(ensure_small_model(directory, self._say, self._settings.seed, self.warm_up))

    def _places(self) -> list[str]:
        """Return the flags of `turnwise up` that name its files."""
        out, file = self._settings.out, self._settings.trainer_config
        trainer = ["--config" if has_sections(file) else "--trainer-config", str(file)]
        return ["--database", f"sqlite:///{out / 'turnwise.db'}", "--runs-dir", str(out), *trainer]

    def _stack(self) -> Supervisor:
        """Return `turnwise up` with its files under `out`."""
        port = self._proxy.rpartition(":")[2]
        up = Child(
            name="up",
            argv=command("up", "--model", self._model, *self._places(), "--port", port),
            ready=f"{self._proxy}/readyz",
            shown_lines=re.compile(r"\s*(?P<text>.*)"),
            start_seconds=3 * UpSettings().start_seconds,
            grace_seconds=UP_SECONDS,
        )
        return Supervisor([up], log_directory=self._logs, say=self._say, max_quick_deaths=1)

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:
        """Return a line of a tasks file; `options` are further arguments of `make_task`."""
        settings = self._settings
        return plain_agent.task_line(str(settings.agent), self.tasks, split, index, settings.seed, dict(options))

    def _write_tasks(self) -> None:
        """Write more training tasks than will be played, and the held-out tasks, as files for `turnwise run`."""
        settings = self._settings
        num_tasks = SPARE_TASKS * settings.max_versions * self._groups_per_version()
        self._write_tasks_file("train", "train", range(num_tasks))
        self._write_tasks_file("eval", "eval", range(settings.num_eval_tasks))

    def _write_tasks_file(
        self, name: str, split: Split, indices: range, options: Mapping[str, Any] | None = None
    ) -> None:
        lines = (json.dumps(self.task(split, index, options or self.options)) for index in indices)
        self._tasks_file(name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _tasks_file(self, name: str) -> Path:
        return self._settings.out / f"{name}-tasks.jsonl"

    def _groups_per_version(self) -> int:
        settings = self._settings
        return settings.groups_per_batch * (settings.group_size if settings.single_sessions else 1)

    async def _play(self, name: str, split: Split, *flags: str, tasks: str | None = None) -> list[RunResult]:
        """Play the tasks of a file, by default those of the split, by `turnwise run`; return the results.

        Raises:
            RolloutFailed: some were not played, or too many failed.
        """
        log = self._logs / f"{name}.log"
        places = ["--url", self._proxy, "--tasks", str(self._tasks_file(tasks or split))]
        places += ["--out", str(self._results(name)), "--split", split]
        agent = ["--call", self.call, "--python", self.python, "--parallel", str(self.num_parallel)]
        agent += ["--timeout", f"{SESSION_SECONDS:g}"]
        shown = {"training": "learning, sessions played"}.get(name, f"playing {name}")
        total = None if name == "training" else self._tasks_file(tasks or split).read_bytes().count(b"\n")
        with self._doing(shown, total) as advance:
            showing = asyncio.create_task(self._show(name, advance))
            ended = await run_limited(
                command("run", *places, *agent, *flags),
                cwd=Path.cwd(),
                environment=os.environ,
                log=log,
                timeout_seconds=None,
                grace_seconds=RUN_SECONDS,
            )
            showing.cancel()
        results = read_results(self._results(name) / "results.jsonl")
        self._check_failed(results)
        if not results or ended.exit_status not in (0, 1):
            raise RolloutFailed(f"`turnwise run` ended with {ended.exit_status}; its log {log}:\n{tail_of(log)}")
        return results

    async def _show(self, name: str, advance: Advance) -> None:
        path = self._results(name) / "results.jsonl"
        while True:
            advance(path.read_bytes().count(b"\n") if path.exists() else 0)
            await asyncio.sleep(POLL_SECONDS)

    async def _held_out(self, name: str, tasks: str = "eval", *flags: str) -> list[RunResult]:
        """Play held-out tasks, a block at a time, until the mean reward is known well enough; return the results."""
        lines, results = self._tasks_file(tasks).read_text(encoding="utf-8").splitlines(), list[RunResult]()
        for number, first in enumerate(range(0, len(lines), BLOCK)):
            part = f"{name}-{number}"
            block = lines[first : first + BLOCK]
            self._tasks_file(part).write_text("\n".join(block) + "\n", encoding="utf-8")
            results += await self._play(part, "eval", "--parallel", str(BLOCK), *flags, tasks=part)
            if margin(results) <= self._settings.eval_margin and not self._settings.thorough:
                break
        self._say("demo", f"held-out reward, {name}: {mean_reward(results):.2f} ± {margin(results):.2f}")
        return results

    def _results(self, name: str) -> Path:
        return self._settings.out / "rollouts" / name

    def _check_failed(self, results: Sequence[RunResult]) -> int:
        """Return how many sessions failed.

        Raises:
            RolloutFailed: too many.
        """
        failed = [result for result in results if is_failed(result) or result.termination_reason == "timeout"]
        if len(failed) >= MAX_FAILED_SESSIONS:
            problem = failed[-1].error or failed[-1].termination_reason
            raise RolloutFailed(f"{len(failed)} sessions failed, the last with {problem}")
        return len(failed)

    async def _learn(self, client: AsyncClient, up: Supervisor) -> RunReport:
        """Play until it has learnt; return what the run has shown."""
        report = await self._learn_one(client, up)
        await self._count(client, report)
        return report

    async def _learn_one(self, client: AsyncClient, up: Supervisor) -> Report:
        """Train until new training tasks earn enough, then play the held-out tasks with nothing beside them."""
        settings = self._settings
        before = await self._held_out("before")
        report = Report(title=self.title, seed=settings.seed)
        report.set_before(before)
        evaluated = 0
        while True:
            async with self._training(client, up, report):
                await self._learnt_since(evaluated)
            evaluated = self._version
            served = await active_policy(client) or {"version": 0}
            await client.activate(served["version"])  # the trainer may publish another one meanwhile
            after = await self._held_out(f"version-{served['version']}")
            report.set_after(after)
            await self._write_transcript(client, before, after)
            is_enough = self.plays_held_out_once or report.reward_after >= settings.enough_reward
            if is_enough or self._has_played_all or self._version >= settings.max_versions:
                break
            await client.activate(served["version"], pin=False)
        report.num_policy_versions = self._version
        return report

    @contextlib.asynccontextmanager
    async def _training(self, client: AsyncClient, up: Supervisor, report: Report) -> AsyncIterator[None]:
        """Play training tasks and follow the versions in the background; fail as soon as one of them fails.

        Running sessions are completed at the end.
        """
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._train()), tasks.create_task(self._follow(client, up, report))]
            yield
            for task in background:
                task.cancel()

    async def _train(self) -> None:
        """Play training tasks, never more than `lead` batches ahead of the trainer.

        Raises:
            RolloutFailed: all tasks have been played.
        """
        settings = self._settings
        size = 1 if settings.single_sessions else settings.group_size
        pace = ["--groups-per-version", str(self._groups_per_version()), "--lead", str(settings.lead)]
        results = await self._play("training", "train", "--group-size", str(size), *pace)
        if not self.is_control:
            raise RolloutFailed(f"the target is not reached after all training tasks, in {len(results)} sessions")
        self._has_played_all = True

    async def _learnt_since(self, version: int) -> None:
        """Wait until there is a later version and the latest batch of tasks earned enough, or for the last version."""
        settings = self._settings
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if self._version > version and self._latest_reward(self._played()) >= settings.target_reward:
                return
            if self._has_played_all or self._version >= settings.max_versions:
                return

    async def _follow(self, client: AsyncClient, up: Supervisor, report: Report) -> None:
        """Follow the policy versions and print a line for each.

        Raises:
            ChildFailed: `turnwise up` has ended.
            RolloutFailed: too many sessions failed.
        """
        while True:
            up.check()
            active = await active_policy(client)
            if active is not None and active["version"] > self._version:
                self._version = active["version"]
                played = self._played()
                self._check_failed(played)
                point = Point(
                    self._version,
                    len(played),
                    self._latest_reward(played),
                    active["reload_seconds"],
                    (active["metrics"] or {}).get("staleness_mean"),
                )
                report.curve.append(point)
                self._say("learn", describe(point))
            await asyncio.sleep(POLL_SECONDS)

    def _played(self) -> list[RunResult]:
        return read_results(self._results("training") / "results.jsonl")

    def _latest_reward(self, played: Sequence[RunResult]) -> float:
        """Return the mean reward of the latest sessions, as many as a batch has."""
        return mean_reward(played[-self._settings.groups_per_batch * self._settings.group_size :])

    async def _write_transcript(
        self, client: AsyncClient, before: Sequence[RunResult], after: Sequence[RunResult]
    ) -> None:
        """Write one task's conversation before and after training, if possible a task that is solved only after it."""
        first = {result.task_id: result for result in before}
        pairs = [(first[result.task_id], result) for result in after if result.task_id in first]
        pair = min(pairs, key=lambda pair: (pair[0].reward or 0) - (pair[1].reward or 0))
        parts = [f"# Task {pair[0].task_id}"]
        self.example = [f"task {pair[0].task_id}"]
        for title, result in zip(("Before", "After"), pair, strict=True):
            parts.append(f"## {title}: reward {result.reward:g}, {result.num_turns} turns")
            parts.append(await conversation(client, result.session_id))
            self.example.append(
                f"{title.lower()} (reward {result.reward or 0:g}): {await last_reply(client, result.session_id)}"
            )
        (self._settings.out / "transcript.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    async def _count(self, client: AsyncClient, report: Report) -> None:
        """Copy the counts of the proxy and of `turnwise run` to the report."""
        families = text_string_to_metric_families(await client.metrics())
        samples = [each for family in families for each in family.samples]
        for sample in samples:
            match sample.name:
                case "turnwise_turns_total":
                    outcome = sample.labels["outcome"]
                    report.outcomes[outcome] = report.outcomes.get(outcome, 0) + int(sample.value)
                case "turnwise_refused_total":
                    report.refused[sample.labels["code"]] = int(sample.value)
                case "turnwise_tokens_total" if sample.labels["kind"] == "sampled":
                    report.num_sampled_tokens = int(sample.value)
        played = [
            result
            for path in (self._settings.out / "rollouts").glob("*/results.jsonl")
            for result in read_results(path)
        ]
        report.num_sessions = len(played)
        report.num_turns = sum(report.outcomes.values())
        report.num_chains_max = max([session["num_chains"] async for session in client.sessions()])
        report.failures = count_failures(samples)
        if num_sessions := self._check_failed(played):
            report.failures["sessions"] = num_sessions
        report.reload_pause_seconds_max = max((point.reload_seconds or 0.0 for point in report.curve), default=0.0)


async def conversation(client: AsyncClient, session_id: str) -> str:
    """Return a session's conversation as text."""
    turns = [turn async for turn in client.turns(session_id)]
    messages = grader.conversation(turns, turns[-1]["turn_id"])["messages"]
    texts = [(each["role"], each.get("content") or json.dumps(each.get("tool_calls"), indent=2)) for each in messages]
    return "\n\n".join(f"**{role}**\n\n~~~\n{text}\n~~~" for role, text in texts)


async def last_reply(client: AsyncClient, session_id: str) -> str:
    """Return the start of a session's last reply."""
    turns = [turn async for turn in client.turns(session_id)]
    response = (turns[-1]["response"] if turns else None) or {}
    text = response.get("content") or json.dumps(response.get("tool_calls") or "no reply")
    return " ".join(text.split())[:SHOWN_CHARACTERS]


def describe(point: Point) -> str:
    """Return one version's line for the terminal."""
    filled = round(point.reward * 30)
    pause = f"{(point.reload_seconds or 0) * 1000:4.0f} ms"
    stale = "" if point.staleness is None else f"  staleness {point.staleness:.1f}"
    return (
        f"version {point.version:2d}  reward {point.reward:.2f} [{'#' * filled}{'.' * (30 - filled)}]  "
        f"{point.num_sessions:5d} sessions  reload {pause}{stale}"
    )


def fresh(directory: Path, names: Sequence[str]) -> None:
    """Create a directory, and delete what an earlier run left in it under these names."""
    import shutil

    directory.mkdir(parents=True, exist_ok=True)
    for path in (directory / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def main(demo: Demo, settings: DemoSettings, say: Say) -> int:
    """Run a demo, print its result, and return the exit status."""
    report = None
    try:
        report = asyncio.run(demo.run())
    except* TurnwiseError as failures:
        for failure in failures.exceptions:
            say("demo", f"failed: {failure}")
    if report is None:
        return 1
    for line in report.lines(settings.out):
        say("demo", line)
    for line in demo.example:
        say("example", line)
    for line in demo.next_steps():
        say("next", line)
    if missed := settings.missed(report):
        say("demo", f"target missed: {missed}")
    return 1 if missed else 0


def demo_command(
    name: str, settings: type[AnySettings], demo: Callable[[AnySettings, Say], Demo], summary: str
) -> SettingsCommand:
    """Return the command that runs a demo with output on the terminal."""

    def run(given: AnySettings) -> None:
        say = Terminal()
        sys.exit(main(demo(given, say), given, say))

    return SettingsCommand(name, section="demo", settings=lambda: settings, run=run, help=summary)
