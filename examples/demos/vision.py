"""`python -m examples.demos.vision`: a model that sees learns from rewards what three pictures are called.

In the end it is shown other held-out pictures than those whose names are rewarded, and must guess. `--control
--max-versions 4` shows such pictures in the training too, in as many sessions as four versions may take: there is
nothing to learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from examples.colour_words import tasks as colour_words
from examples.demos.driver import Demo, DemoSettings, demo_command
from examples.demos.plain_agent import Split
from examples.demos.report import Report
from turnwise.client import AsyncClient
from turnwise.processes.supervisor import Supervisor
from turnwise.processes.terminal import Say
from turnwise.types import Json

MOST_BY_CHANCE = 0.3
"""Held-out reward that a control may keep of what the warm-up gave it."""
SHUFFLED = "shuffled"


class VisionDemoSettings(DemoSettings):
    """Settings of `make demo-vision`."""

    agent: Path = Path("examples/colour_words/agent.py")
    trainer_config: Path = Path("examples/colour_words/train.toml")
    out: Path = Path("runs/demo-vision")
    groups_per_batch: int = Field(default=12, ge=1)
    target_reward: float = Field(default=0.92, gt=0, le=1)
    enough_reward: float = Field(default=0.9, gt=0, le=1)
    num_eval_tasks: int = Field(default=256, ge=1)
    eval_margin: float = Field(default=0.06, gt=0)
    max_versions: int = Field(default=200, ge=1)
    control: bool = False

    def missed(self, report: Report) -> str | None:
        """Return the target if the run missed it; a control must not learn."""
        if not self.control:
            return super().missed(report)
        return (
            None
            if report.reward_after <= MOST_BY_CHANCE
            else f"a control's held-out reward is at most {MOST_BY_CHANCE}"
        )


class VisionDemo(Demo):
    """One run of the demo."""

    tasks = colour_words.__name__
    title = "A model learns from rewards what pictures are called"
    _settings: VisionDemoSettings

    def __init__(self, settings: VisionDemoSettings, say: Say) -> None:
        super().__init__(settings, say)
        self.is_control = settings.control

    def _build_model(self) -> str:
        from examples.colour_words.model import ensure_model  # loads torch

        directory = self._settings.out / f"model-{self._settings.seed}"
        self._say("model", f"building a model of 0.9 M parameters that sees into {directory}, some minutes, once")
        return str(ensure_model(directory, self._settings.seed))

    def _write_tasks(self) -> None:
        super()._write_tasks()
        self._write_tasks_file(SHUFFLED, "eval", range(self._settings.num_eval_tasks), {SHUFFLED: True})

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:
        shuffled = {SHUFFLED: True} if self._settings.control and split == "train" else {}
        return super().task(split, index, {**options, **shuffled})

    async def _learn_one(self, client: AsyncClient, up: Supervisor) -> Report:
        report = await super()._learn_one(client, up)
        await self._held_out("with-other-pictures", SHUFFLED)
        return report


command = demo_command(
    "demo-vision",
    VisionDemoSettings,
    VisionDemo,
    "Let a model that sees learn from rewards what pictures are called.",
)

if __name__ == "__main__":
    command()
