"""Where gauges go: JSON Lines always; a terminal line, TensorBoard and W&B when asked for.

A recorder takes plain numbers by name and a count, so a new one is three short methods, and the
libraries behind the optional ones are imported only when they are used.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import SettingsError
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
    """Event files for TensorBoard.

    Raises:
        SettingsError: The package is not installed.
    """

    def __init__(self, directory: Path) -> None:
        with _needing("tensorboard", "tensorboard_dir"):
            from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def write(self, scalars: Scalars, step: int) -> None:
        """Add each number as a scalar: a batch's over batches, an optimizer step's over optimizer steps."""
        for name, value in _numbers(scalars).items():
            self._writer.add_scalar(name, value, scalars.get("update", step))

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases.

    Raises:
        SettingsError: The package is not installed.
    """

    def __init__(self, project: str, config: Mapping[str, Any]) -> None:
        with _needing("wandb", "wandb_project"):
            import wandb

        self._run: Any = wandb.init(project=project, config=dict(config))
        # Without axes of their own, the optimizer steps of a batch would overwrite each other and the batch.
        self._run.define_metric("*", step_metric="batch")
        self._run.define_metric("update/*", step_metric="update/number")

    def write(self, scalars: Scalars, step: int) -> None:
        """Log the numbers: a batch's over batches, an optimizer step's over optimizer steps."""
        axis = {"update/number": scalars["update"]} if "update" in scalars else {"batch": step}
        self._run.log(_numbers(scalars) | axis)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _numbers(scalars: Scalars) -> dict[str, float]:
    """Return the numbers among the gauges; those of an optimizer step are named apart from the batch's."""
    prefix = "update/" if "update" in scalars else ""
    return {
        f"{prefix}{name}": value
        for name, value in scalars.items()
        if name != "update" and isinstance(value, int | float) and not isinstance(value, bool)
    }


@contextlib.contextmanager
def _needing(package: str, setting: str) -> Iterator[None]:
    """Say what to do when an optional package is missing."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(f"{setting} needs {package}, which is not installed; pip install {package}") from error


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
