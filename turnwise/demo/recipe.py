"""Recipes: a task with its agent, its grader and its settings, in one directory.

A recipe is `recipe.py` with `make_task`, `reward` and `play`, which import nothing of Turnwise, and two settings files:
`recipe.toml` for a GPU and `small.toml` for a CPU. Their table `[demo]` belongs to this module, the others to the
processes. The run itself is that of the pretrained demo.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from turnwise.demo.plain_agent import Split, load_module, play_task
from turnwise.demo.real import RealDemo, RealDemoSettings
from turnwise.demo.report import Report
from turnwise.errors import SettingsError
from turnwise.processes.printer import Say
from turnwise.types import Json

if TYPE_CHECKING:
    from turnwise.rollouts.worker import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
"""The recipes and examples of a checkout."""


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
    unrelated: Path = EXAMPLES / "bosses" / "unrelated.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class RecipeTask:
    """A task of a recipe."""

    task_id: str
    fields: Json
    """What the recipe's `make_task` returned; `answer` is for the grader alone."""

    def for_agent(self) -> dict[str, Any]:
        """Return the task as JSON for an agent, without the answer."""
        return {name: value for name, value in self.fields.items() if name != "answer"}


class RecipeTasks:
    """The tasks and the grader of a recipe."""

    def __init__(self, name: str, module: ModuleType, options: Json) -> None:
        self._name, self._module, self._options = name, module, options

    def make_task(self, split: Literal["train", "eval"], index: int, seed: int, /) -> RecipeTask:
        """Return the `index`-th task of a split; the same arguments give the same task."""
        task_id = f"{self._name}-{split}-{seed}-{index}"
        rng = random.Random(task_id)  # noqa: S311 - a game, no secret
        return RecipeTask(task_id, self._module.make_task(rng, split, **self._options))

    def reward(self, task: RecipeTask, final_text: str, /) -> float:
        """Return the grader's reward of what the agent returned."""
        return float(self._module.reward(task.fields, final_text))


class RecipeDemo(RealDemo):
    """The run of a recipe."""

    call = f"{__name__}:play"

    def __init__(self, settings: RecipeSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._model = settings.model
        name = settings.agent.resolve().parent.name
        self.tasks = RecipeTasks(name, load_module(str(settings.agent)), settings.options)
        self._recipe = {"recipe": name, "options": settings.options}
        self.title = f"{Path(settings.model or self._base).name}: {name}"

    def _build_model(self) -> str:
        return self._model or super()._build_model()

    async def _complete(self, report: Report) -> None:
        """Measure what was forgotten, of the model whose replies are known."""
        if self._model is None:
            await super()._complete(report)

    def task(self, split: Split, index: int) -> Json:
        """Return a line of a tasks file."""
        return super().task(split, index) | self._recipe


async def play(line: Json, run: Run) -> float:
    """Play the task that a line names; return its reward."""
    tasks = RecipeTasks(line["recipe"], load_module(line["agent"]), line["options"])
    return await play_task(tasks, line, run)


def recipes() -> dict[str, Path]:
    """Return the directories of the recipes by name."""
    return {path.parent.name: path.parent for path in sorted(EXAMPLES.glob("recipes/*/recipe.py"))}


def find_recipe(name: str) -> Path:
    """Return the directory of a recipe.

    Raises:
        SettingsError: there is none of this name.
    """
    known = recipes()
    if name not in known:
        names = ", ".join(known) or "none; recipes are in a checkout of Turnwise, not in the package"
        raise SettingsError(f"there is no recipe {name!r}; the recipes are: {names}")
    return known[name]
