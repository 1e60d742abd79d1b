"""The demo's report: the numbers as JSON and the learning curve as an image."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass(kw_only=True)
class RunReport(abc.ABC):
    """What every demo reports of a run."""

    seed: int
    seconds: float = 0.0
    """Time from the stack's start to its end, without the build of the model."""
    load_average: float = 0.0
    """Of the machine at the end, over five minutes: other programs take part of the time."""
    warm_up_seconds: float = 0.0

    def write(self, directory: Path) -> None:
        """Write `report.json` and a picture."""
        (directory / "report.json").write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        self.draw(directory)

    @abc.abstractmethod
    def draw(self, directory: Path) -> None:
        """Write the picture."""

    @abc.abstractmethod
    def lines(self, out: Path) -> list[str]:
        """Return the result in words, and where the files are."""


@contextlib.contextmanager
def picture(path: Path, xlabel: str, title: str, **legend: Any) -> Iterator[Any]:
    """Yield the axes of a picture of mean rewards, and write it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    yield axes
    axes.set(xlabel=xlabel, ylabel="mean reward", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", **legend)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@dataclasses.dataclass(kw_only=True)
class Report(RunReport):
    """The run of one policy."""

    title: str
    """Of the picture."""
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
    failed_requests: int = 0
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Turns by outcome."""
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests that the proxy answered with its own error, by code."""
    num_chains_max: int | None = None
    """Maximum number of chains of a session, if it was counted."""
    reload_pause_seconds_max: float = 0.0
    curve: list[Point] = dataclasses.field(default_factory=list)

    def draw(self, directory: Path) -> None:
        """Write `learning.png`."""
        title = f"{self.title} (seed {self.seed}, {self.num_policy_versions} policy versions)"
        with picture(directory / "learning.png", "sessions played", title) as axes:
            sessions, rewards = [p.num_sessions for p in self.curve], [p.reward for p in self.curve]
            axes.plot(sessions, rewards, ".-", label="training tasks, each new")
            ends = [0, sessions[-1] if sessions else 0]
            label = f"{self.num_eval_tasks} held-out tasks"
            axes.plot(ends, [self.reward_before, self.reward_after], "D", label=label)

    def lines(self, out: Path) -> list[str]:
        """Return the result in words, and where the files are."""
        before, after = self.reward_before, self.reward_after
        played = f"{self.num_sessions} sessions, {self.num_turns} turns, {self.num_sampled_tokens} sampled tokens"
        return [
            f"held-out reward {before:.2f} → {after:.2f}, over {self.num_eval_tasks} tasks each",
            f"{self.num_policy_versions} policy versions, {played}, {self.failed_requests} failed requests",
            f"{self.warm_up_seconds:.0f} s to build the model, {self.seconds:.0f} s from the start of the engine on",
            f"numbers: {out / 'report.json'}   curve: {out / 'learning.png'}   logs: {out / 'logs'}",
            f"one task before and after: {out / 'transcript.md'}",
            f"look inside: turnwise sessions --database sqlite:///{out / 'turnwise.db'}",
        ]
