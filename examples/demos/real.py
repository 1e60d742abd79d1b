"""`python -m examples.demos.real`: a pretrained model of 135 M parameters learns a task of three turns.

It measures the reward on fresh held-out tasks, sampled as in training; `--thorough` also greedily, and what the
training changed on unrelated conversations. `--control` gives each session the reward of another one: there is nothing
to learn, so the held-out reward must not rise. It falls, because steps in random directions cost the model the format
of the commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from examples.bosses import tasks as bosses
from examples.demos.driver import Demo, DemoSettings, demo_command
from examples.demos.plain_agent import Split
from examples.demos.report import Report, mean_reward, measure_forgetting
from turnwise.client import AsyncClient
from turnwise.default_models.pretrained import write_pretrained
from turnwise.processes.supervisor import Supervisor
from turnwise.processes.terminal import Say
from turnwise.rollouts.runner import active_policy
from turnwise.types import Json, PolicyKind

GREEDY = ("--sampling", '{"temperature": 0}')
MOST_RISE = 0.1
"""How far a control's held-out reward may rise: about two standard errors of the difference over 128 tasks each."""


class RealDemoSettings(DemoSettings):
    """Settings of `make demo`."""

    agent: Path = Path("examples/bosses/agent.py")
    trainer_config: Path = Path("examples/bosses/train.toml")
    out: Path = Path("runs/demo")
    groups_per_batch: int = Field(default=8, ge=1)
    target_reward: float = Field(default=0.92, gt=0, le=1)
    enough_reward: float = Field(default=0.9, gt=0, le=1)
    num_eval_tasks: int = Field(default=128, ge=1)
    eval_margin: float = Field(default=0.12, gt=0)
    max_versions: int = Field(default=24, ge=1)
    control: bool = False
    """Give each training session the reward of another one: nothing can be learnt, and all versions are trained."""
    unrelated: Path = Path("examples/bosses/unrelated.jsonl")
    """Conversations that have nothing to do with the task, with replies of SmolLM2-135M-Instruct."""

    def missed(self, report: Report) -> str | None:
        """Return the target if the run missed it; a control must not learn."""
        if not self.control:
            return super().missed(report)
        most = report.reward_before + MOST_RISE
        return None if report.reward_after <= most else f"a control's held-out reward rises to at most {most:.2f}"


class RealDemo(Demo):
    """The demo with pretrained weights."""

    tasks = bosses.__name__
    title = "SmolLM2-135M-Instruct learns a task of three turns"
    num_parallel = 16
    plays_held_out_once = True

    def __init__(self, settings: RealDemoSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._real = settings
        self.is_control = settings.control
        self._base = settings.out / "SmolLM2-135M-Instruct"
        self._learnt: dict[str, Any] = {}
        """The served version at the end, as the API returns it."""

    def _build_model(self) -> str:
        self._say("model", f"SmolLM2-135M-Instruct (quantised to 4 bits before) in {self._base}")
        return str(write_pretrained(self._base))

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:
        """Return a line of a tasks file."""
        return super().task(split, index, options) | {"shuffled": self._real.control and split == "train"}

    async def _learn_one(self, client: AsyncClient, up: Supervisor) -> Report:
        """Let it learn; `--thorough` also plays the held-out tasks greedily, before and after."""
        thorough = self._settings.thorough
        before = await self._held_out("greedy-before", "eval", *GREEDY) if thorough else []
        report = await super()._learn_one(client, up)
        self._learnt = await active_policy(client) or {}
        if thorough:
            after = await self._held_out("greedy-after", "eval", *GREEDY)
            report.greedy = (mean_reward(before), mean_reward(after))
        return report

    async def _complete(self, report: Report) -> None:
        """Measure what was forgotten, now that the engine leaves the processor free."""
        if not self._settings.thorough:
            return
        with self._doing("measuring what was forgotten"):
            await self._measure(report)

    async def _measure(self, report: Report) -> None:
        found = report.forgetting = await asyncio.to_thread(
            measure_forgetting,
            self._base,
            Path(self._learnt["path"]),
            PolicyKind(self._learnt["kind"]),
            self._real.unrelated,
        )
        self._say(
            "demo",
            f"{found.num_conversations} unrelated conversations: loss {found.loss_before:.3f} → "
            f"{found.loss_after:.3f}, KL {found.kl:.3f} nats a token",
        )


command = demo_command(
    "demo",
    RealDemoSettings,
    RealDemo,
    "Let a pretrained model learn a task from its rewards, everything real.",
)

if __name__ == "__main__":
    command()
