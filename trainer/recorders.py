"""Where gauges go: JSON Lines always; a terminal line, TensorBoard and W&B when asked for.

One decision: a recorder takes plain numbers by name and a count, so a new one is three short methods, and the
libraries behind the optional ones are imported only when they are used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from turnwise.types import utc_now

Scalars = Mapping[str, Any]


class Recorder(Protocol):
    """Takes gauges."""

    def write(self, scalars: Scalars, step: int) -> None:
        """Record the gauges of one batch, update or evaluation."""

    def close(self) -> None:
        """Flush and let go."""


class ChainRecorder:
    """Passes everything on to several recorders."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = list(recorders)

    def write(self, scalars: Scalars, step: int) -> None:
        """Record with each of them."""
        for recorder in self._recorders:
            recorder.write(scalars, step)

    def add(self, recorder: Recorder) -> None:
        """Record with one more."""
        self._recorders.append(recorder)

    def close(self) -> None:
        """Close each of them."""
        for recorder in self._recorders:
            recorder.close()


class JsonLines:
    """One JSON object a line; the file is open only while a line is written, so that a crash loses none."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, scalars: Scalars, step: int) -> None:
        """Append a line."""
        line = {"at": utc_now().isoformat(), "step": step, **scalars}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False, default=str) + "\n")

    def close(self) -> None:
        """Nothing is held."""


class ProgressLine:
    """One line on the terminal a batch."""

    SHOWN = (
        "policy_version",
        "reward_mean",
        "staleness_mean",
        "entropy",
        "kl",
        "clip_fraction",
        "grad_norm",
        "seconds",
    )

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stderr, highlight=False)

    def write(self, scalars: Scalars, step: int) -> None:
        """Print the batch's most telling gauges."""
        shown = [f"{name} [bold]{_short(scalars[name])}[/]" for name in self.SHOWN if scalars.get(name) is not None]
        if scalars.get("refused"):
            shown.append(f"[red]refused: {scalars['refused']}[/]")
        if shown:
            self._console.print(f"batch {step}  " + "  ".join(shown))

    def close(self) -> None:
        """Nothing is held."""


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def write(self, scalars: Scalars, step: int) -> None:
        """Add each number as a scalar."""
        for name, value in _numbers(scalars).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases."""

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(project=project, config=dict(config))

    def write(self, scalars: Scalars, step: int) -> None:
        """Log the numbers."""
        self._run.log(_numbers(scalars), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _numbers(scalars: Scalars) -> dict[str, float]:
    return {
        name: value for name, value in scalars.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
