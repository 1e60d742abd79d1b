"""`python -m examples.demos.summary`: a model learns to sum up what its next context will be asked for.

The agent's loop compacts its context by a prompt of its own. All that decides the reward is in the summary.
`--control untrained` trains all turns but the summaries, and `--control shuffled` gives each training session the
reward of another one: neither learns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from examples.demos.driver import Demo, DemoSettings, demo_command
from examples.demos.plain_agent import Split
from examples.demos.report import Report
from examples.secret import tasks as secret
from turnwise.processes.terminal import Say
from turnwise.types import Json

MOST_UNTRAINED = 0.4
MOST_CHANGE = 0.05
UNTRAINED = 'train_roles = ["main", "sub_agent"]\n'


class SummaryDemoSettings(DemoSettings):
    """Settings of `make demo-summary`."""

    agent: Path = Path("examples/secret/agent.py")
    trainer_config: Path = Path("examples/secret/train.toml")
    out: Path = Path("runs/demo-summary")
    groups_per_batch: int = Field(default=8, ge=1)
    target_reward: float = Field(default=0.9, gt=0, le=1)
    enough_reward: float = Field(default=0.85, gt=0, le=1)
    num_eval_tasks: int = Field(default=256, ge=1)
    eval_margin: float = Field(default=0.05, gt=0)
    max_versions: int = Field(default=40, ge=1)
    control: Literal["none", "untrained", "shuffled"] = "none"
    """`untrained`: summaries carry no loss; `shuffled`: training sessions have the rewards of others."""

    def missed(self, report: Report) -> str | None:
        """Return the target if the run missed it; a control must not learn."""
        if self.control == "none":
            return super().missed(report)
        most = MOST_UNTRAINED if self.control == "untrained" else report.reward_before + MOST_CHANGE
        most += report.margin_after
        return None if report.reward_after <= most else f"a control's held-out reward is at most {most:.2f}"


class SummaryDemo(Demo):
    """One run of the demo."""

    warm_up = secret.WARM_UP
    tasks = secret.__name__
    title = "A model learns to sum up what its next context will be asked for"
    _settings: SummaryDemoSettings

    def __init__(self, settings: SummaryDemoSettings, say: Say) -> None:
        self._trained_by = settings.trainer_config
        if settings.control == "untrained":
            settings = settings.model_copy(update={"trainer_config": settings.out / "train.toml"})
        super().__init__(settings, say)
        self.is_control = settings.control != "none"

    def _build_model(self) -> str:
        from turnwise.default_models.small_model import SmallModelSpec, build_small_model, warm_up_loss  # loads torch

        for num_steps in secret.NUM_WARM_UP_STEPS:
            directory = self._settings.out / f"model-{self._settings.seed}-{num_steps}"
            spec = SmallModelSpec(self.warm_up, self._settings.seed, num_warm_up_steps=num_steps)
            self._say("model", f"building the small demo model into {directory}, two minutes, once")
            build_small_model(directory, spec)
            if warm_up_loss(directory) <= secret.MOST_LOSS:
                break
        return str(directory)

    def _prepare(self) -> str | None:
        if self._settings.control == "untrained":
            given = self._trained_by.read_text(encoding="utf-8")
            self._settings.trainer_config.write_text(UNTRAINED + given, encoding="utf-8")
        return super()._prepare()

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:
        shuffled = self._settings.control == "shuffled" and split == "train"
        return super().task(split, index, options) | {"shuffled": shuffled}


command = demo_command(
    "demo-summary",
    SummaryDemoSettings,
    SummaryDemo,
    "Let a model learn to sum up what its next context will be asked for.",
)

if __name__ == "__main__":
    command()
