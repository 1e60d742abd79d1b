"""The demo with a third-party agent: mini-swe-agent, unmodified, learns the trail as files in a real shell.

It is the demo of `driver` with another model format. The agent is a function `play(task, run)`, called by the code of
`turnwise run --call`, and may have its own virtual environment. `AGENT_WORLDS` lists the formats of tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from turnwise.client import AsyncClient
from turnwise.demo import shell_trail, trail, typed_trail
from turnwise.demo.driver import Demo, DemoSettings, fresh_directory
from turnwise.demo.report import Report
from turnwise.demo.rollouts import Playing, Tally
from turnwise.errors import RolloutFailed
from turnwise.rewards import transcript
from turnwise.rollouts import Runner, RunResult, RunSettings, Task, opened
from turnwise.rollouts.report import is_failed

MAX_FAILED_SESSIONS = 5
"""Number of failed sessions after which the demo ends with the last session's error."""
FIRST_TRANSCRIPT_TASK = 1_000_000
"""Index of the first held-out task that may be written as a transcript."""
NUM_TRANSCRIPT_TASKS = 8
AGENT_WORLDS = {"shell_trail": shell_trail, "typed_trail": typed_trail}
"""The modules that write an agent's tasks; the model is warmed with conversations of the same module."""


class AgentDemoSettings(DemoSettings):
    """Settings of `make demo-agent`."""

    agent: Path = Path("examples/mini_swe_agent/agent.py")
    world: Literal["shell_trail", "typed_trail"] = "shell_trail"
    """Format of the agent's tasks and of the model's conversations: shell commands, or calls of a typed tool."""
    trainer_config: Path = Path("examples/mini_swe_agent/train.toml")
    out: Path = Path("runs/demo-agent")
    groups_per_batch: int = Field(default=16, ge=1)
    target_reward: float = Field(default=0.85, gt=0, le=1)
    """Mean reward of a batch of training tasks that starts a held-out evaluation.

    It is below `enough_reward` because training tasks are sampled at temperature 1 and held-out tasks greedily."""
    enough_reward: float = Field(default=0.95, gt=0, le=1)
    python: str = sys.executable
    """Interpreter of the environment that the agent is installed in."""
    parallel: int = Field(default=32, ge=1)
    """Number of concurrent sessions."""


class AgentRollouts:
    """Plays the agent's sessions for the demo."""

    def __init__(self, runner: Runner, *, world: str, seed: int) -> None:
        self._runner = runner
        self._world = AGENT_WORLDS[world]
        self._seed = seed
        self.tally = Tally()

    @property
    def is_training(self) -> bool:
        """False skips the training sessions that have not begun; running sessions are completed."""
        return not self._runner.stopping.is_set()

    @is_training.setter
    def is_training(self, value: bool) -> None:
        if not value:
            self._runner.stopping.set()

    async def evaluate(self, first: int, count: int) -> float:
        """Play each of some held-out tasks once, without training on them; return their mean reward."""
        tasks = [self._task("eval", first + index) for index in range(count)]
        # One call for each: the tasks of one call start one after the other, each behind all waiting training groups.
        played = await asyncio.gather(*(self._runner.play([task], split="eval") for task in tasks))
        results = self._count([result for results in played for result in results])
        return sum(result.reward or 0.0 for result in results) / count

    async def train_group(self, index: int, size: int) -> None:
        """Play one training task `size` times as one group."""
        results = self._count(await self._runner.play([self._task("train", index)], group_size=size))
        self.tally.recent_rewards += [result.reward or 0.0 for result in results]

    async def train_singles(self, index: int, size: int) -> None:
        """Play `size` training tasks once each, in sessions without a group."""
        tasks = [self._task("train", index * size + number) for number in range(size)]
        results = self._count(await self._runner.play(tasks))
        self.tally.recent_rewards += [result.reward or 0.0 for result in results]

    async def play_transcripts(self, pass_index: int) -> list[RunResult]:
        """Play the tasks for the transcript; this works after training sessions were stopped."""
        self._runner.stopping.clear()
        tasks = [self._task("eval", FIRST_TRANSCRIPT_TASK + index) for index in range(NUM_TRANSCRIPT_TASKS)]
        return self._count(await self._runner.play(tasks, split="eval", pass_index=pass_index))

    def _task(self, split: trail.Split, index: int) -> Task:
        fields = self._world.for_agent(trail.make_task(split, index, self._seed))
        return Task(fields["task_id"], fields)

    def _count(self, results: list[RunResult]) -> list[RunResult]:
        """Count the sessions and the failed ones among them.

        Raises:
            RolloutFailed: too many sessions failed.
        """
        self.tally.num_sessions += len(results)
        for result in results:
            if is_failed(result) or result.termination_reason == "timeout":
                self.tally.num_failed += 1
                if self.tally.num_failed >= MAX_FAILED_SESSIONS:
                    problem = result.error or result.termination_reason
                    raise RolloutFailed(f"{MAX_FAILED_SESSIONS} sessions failed, the last with {problem}")
        return results


class AgentDemo(Demo):
    """One run of the demo with an agent that is called by `turnwise.rollouts`."""

    def __init__(self, settings: AgentDemoSettings, say: Any) -> None:
        super().__init__(settings, say)
        self.world = settings.world
        self._agent_settings = settings

    @contextlib.asynccontextmanager
    async def _rollouts(self, client: AsyncClient) -> AsyncIterator[Playing]:
        settings = self._agent_settings
        module = ".".join(settings.agent.with_suffix("").parts)
        run = RunSettings(
            url=client.base_url,
            call=f"{module}:play",
            tasks=Path("generated"),  # the runner is handed its tasks
            parallel=settings.parallel,
            python=settings.python,
            timeout=120,
            out=fresh_directory(settings.out / "rollouts"),
        )
        async with opened(run) as runner:
            yield AgentRollouts(runner, world=settings.world, seed=settings.seed)

    async def _play_until_learnt(self, client: AsyncClient, rollouts: Playing) -> Report:
        assert isinstance(rollouts, AgentRollouts)
        before = await rollouts.play_transcripts(0)
        report = await super()._play_until_learnt(client, rollouts)
        rollouts.tally.num_failed = 0
        after = await rollouts.play_transcripts(1)
        await self._write_transcript(client, before, after)
        report.num_chains_max = max([session["num_chains"] async for session in client.sessions()])
        return report

    async def _write_transcript(self, client: AsyncClient, before: list[RunResult], after: list[RunResult]) -> None:
        """Write one task's conversation before and after training, if possible a task that is solved only after it."""
        pairs = sorted(zip(before, after, strict=True), key=lambda pair: (pair[0].reward or 0) - (pair[1].reward or 0))
        parts = [f"# Task {pairs[0][0].task_id}"]
        for title, result in zip(("Before", "After"), pairs[0], strict=True):
            parts.append(f"## {title}: reward {result.reward:g}, {result.num_turns} turns")
            parts.append(await conversation(client, result.session_id))
        (self._settings.out / "transcript.md").write_text("\n\n".join(parts) + "\n")


async def conversation(client: AsyncClient, session_id: str) -> str:
    """Return a session's conversation as text."""
    turns = [turn async for turn in client.turns(session_id)]
    messages = transcript.conversation(turns, turns[-1]["turn_id"])["messages"]
    return "\n\n".join(f"**{message['role']}**\n\n~~~\n{message['content']}\n~~~" for message in messages)
