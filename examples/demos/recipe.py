"""Runs a recipe: a task with its agent, its grader and its settings, in one directory.

A recipe is `recipe.py` with `make_task`, `reward` and `play`, which import nothing of Turnwise, and two settings files:
`recipe.toml` for a GPU and `small.toml` for a CPU. Their table `[demo]` belongs to this module, the others to the
processes. The run itself is that of the pretrained demo.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import Field

from examples.demos.driver import main
from examples.demos.plain_agent import load_module
from examples.demos.real import RealDemo, RealDemoSettings
from examples.demos.report import Report
from examples.demos.terminal import Terminal
from turnwise.processes.terminal import Say
from turnwise.types import Json


class RecipeSettings(RealDemoSettings):
    """Settings of `turnwise recipe`."""

    agent: Path = Path("recipe.py")
    """File with the tasks, the agent and the grader."""
    trainer_config: Path = Path("recipe.toml")
    """Settings file of the recipe, with the trainer's table."""
    out: Path = Path("runs/recipe")
    """Directory of the results."""
    model: str | None = None
    """Model directory or id; by default SmolLM2-135M-Instruct."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the recipe's `make_task`."""
    unrelated: Path = Path(__file__).parents[1] / "bosses" / "unrelated.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeTask:
    """A task of a recipe."""

    task_id: str
    fields: Json
    """What the recipe's `make_task` returned; `answer` is for the grader alone."""
    module: ModuleType
    """The recipe's `recipe.py`."""

    def for_agent(self) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name != "answer"}


def make_task(
    split: Literal["train", "eval"], index: int, seed: int, *, file: str, options: Mapping[str, Any]
) -> RecipeTask:
    """Return the `index`-th task of a split of a recipe; the same arguments give the same task.

    Args:
        split: Training tasks, or held-out ones.
        index: Its number.
        seed: Of all tasks.
        file: The recipe's `recipe.py`.
        options: Arguments of its `make_task`.
    """
    module = load_module(file)
    task_id = f"{Path(file).resolve().parent.name}-{split}-{seed}-{index}"
    rng = random.Random(task_id)  # noqa: S311 - a game, no secret
    return RecipeTask(task_id, module.make_task(rng, split, **options), module)


def reward(task: RecipeTask, final_text: str) -> float:
    """Return the grader's reward of what the agent returned."""
    return float(task.module.reward(task.fields, final_text))


class RecipeDemo(RealDemo):
    """The run of a recipe."""

    tasks = __name__

    def __init__(self, settings: RecipeSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._given = settings.model
        self.options = {"file": str(settings.agent), "options": settings.options}
        self.title = f"{Path(settings.model or self._base).name}: {settings.agent.resolve().parent.name}"

    def _build_model(self) -> str:
        return self._given or super()._build_model()

    async def _complete(self, report: Report) -> None:
        if self._given is None:
            await super()._complete(report)


def run(settings: RecipeSettings) -> int:
    """Run a recipe with output on the terminal; return the exit status."""
    say = Terminal()
    return main(RecipeDemo(settings, say), settings, say)
