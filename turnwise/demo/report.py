"""The demo's report: the numbers as JSON and the learning curve as an image."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from turnwise.demo.forgetting import Forgetting


@dataclasses.dataclass(slots=True)
class Point:
    """One policy version on the learning curve."""

    version: int
    num_sessions: int
    """Number of training sessions played when it became active."""
    reward: float
    """Mean reward of the latest batch of training sessions, on new tasks."""
    reload_seconds: float | None
    staleness: float | None
    """Mean staleness over the batch that made this version."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """The whole run."""

    title: str
    """Of the picture."""
    seed: int
    reward_before: float
    reward_after: float = 0.0
    greedy: tuple[float, float] | None = None
    """Held-out reward before and after where the agent's calls are greedy; None if it was not measured."""
    forgetting: Forgetting | None = None
    num_eval_tasks: int = 0
    """Number of held-out tasks of each of the two rewards."""
    num_policy_versions: int = 0
    num_sessions: int = 0
    num_turns: int = 0
    num_sampled_tokens: int = 0
    seconds: float = 0.0
    """Time from the stack's start to its end, without the build of the model."""
    load_average: float = 0.0
    """Of the machine at the end, over five minutes: other programs take part of the time."""
    warm_up_seconds: float = 0.0
    failed_requests: int = 0
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Turns by outcome."""
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests that the proxy answered with its own error, by code."""
    num_chains_max: int | None = None
    """Maximum number of chains of a session, if it was counted."""
    reload_pause_seconds_max: float = 0.0
    curve: list[Point] = dataclasses.field(default_factory=list)

    def write(self, directory: Path) -> None:
        """Write `report.json` and `learning.png`."""
        (directory / "report.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        self._draw(directory / "learning.png")

    def _draw(self, path: Path) -> None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(
            [p.num_sessions for p in self.curve], [p.reward for p in self.curve], ".-", label="training tasks, each new"
        )
        last = self.curve[-1].num_sessions if self.curve else 0
        axes.plot(
            [0, last], [self.reward_before, self.reward_after], "D", label=f"{self.num_eval_tasks} held-out tasks"
        )
        axes.set(
            xlabel="sessions played",
            ylabel="mean reward",
            ylim=(0, 1.02),
            title=f"{self.title} (seed {self.seed}, {self.num_policy_versions} policy versions)",
        )
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
