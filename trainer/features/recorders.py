"""Where gauges go besides their file: to the log, TensorBoard, W&B and trackio, as the settings ask.

The libraries of recorders are imported only when they are used.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.settings import TrainerSettings
from trainer.train import Recorder, Scalars
from turnwise.errors import SettingsError
from turnwise.settings import FromJson, Settings
from turnwise.types import Policy

log = logging.getLogger(__name__)


class RecorderSettings(Settings):
    """Where gauges go."""

    progress: bool = True
    """Log one line a batch: version, reward, groups, seconds and gauges."""
    recorders: Annotated[dict[Literal["tensorboard", "wandb", "trackio"], str], FromJson] = Field(default_factory=dict)
    """Where else numbers are written, by the package: a directory of event files for TensorBoard, a project of
    Weights & Biases or of trackio."""


class ProgressLine:
    """One log line a batch: its version, reward, groups and seconds, then its most important gauges."""

    GAUGES = ("entropy", "kl", "clip_fraction", "grad_norm", "staleness_mean")

    def write(self, scalars: Scalars, step: int) -> None:
        if "eval/reward_mean" in scalars:
            log.info("evaluation after batch %d: %s", step, _named(scalars, list(scalars)))
        if "num_groups" not in scalars:
            return
        trained = scalars["num_groups"] - scalars.get("num_refused_groups", 0)
        num_singles, kind = scalars.get("num_single_sessions", 0), "groups"
        if num_singles:
            kind = "single sessions" if num_singles == scalars["num_groups"] else "groups and single sessions"
        log.info(
            "batch %d: version %s, reward %s, %d of %d %s trained, %s s; %s",
            step,
            scalars.get("policy_version"),
            _short(scalars.get("reward_mean")),
            trained,
            scalars["num_groups"],
            kind,
            _short(scalars.get("seconds", 0.0)),
            _named(scalars, self.GAUGES),
        )

    def close(self) -> None: ...


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        check_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory))

    def write(self, scalars: Scalars, step: int) -> None:
        for name, value in _numbers(scalars).items():
            self._writer.add_scalar(name, value, scalars.get("update", step))

    def close(self) -> None:
        self._writer.close()


class _TrackedRun:
    _run: Any

    def write(self, scalars: Scalars, step: int) -> None:
        axis = {"update/number": scalars["update"]} if "update" in scalars else {"batch": step}
        self._run.log(_numbers(scalars) | axis)

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases(_TrackedRun):
    """A run of Weights & Biases."""

    def __init__(self, project: str, config: Mapping[str, Any], run_file: Path) -> None:
        check_package("wandb")
        import wandb

        known = run_file.read_text(encoding="utf-8").strip() if run_file.is_file() else None
        self._run = wandb.init(project=project, config=dict(config), id=known, resume="allow" if known else None)
        run_file.parent.mkdir(parents=True, exist_ok=True)
        run_file.write_text(f"{self._run.id}\n", encoding="utf-8")
        # Without axes of their own, the optimizer steps of a batch would overwrite each other and the batch.
        self._run.define_metric("*", step_metric="batch")
        self._run.define_metric("update/*", step_metric="update/number")


class Trackio(_TrackedRun):
    """A run of trackio, which a restarted trainer continues."""

    def __init__(self, project: str, config: Mapping[str, Any], run_file: Path) -> None:
        check_package("trackio")
        trackio = importlib.import_module("trackio")
        if not run_file.is_file():
            run_file.parent.mkdir(parents=True, exist_ok=True)
            run_file.write_text(f"run-{secrets.token_hex(4)}\n", encoding="utf-8")
        name = run_file.read_text(encoding="utf-8").strip()
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow")


def _numbers(scalars: Scalars) -> dict[str, float]:
    prefix = "update/" if "update" in scalars else ""
    return {
        f"{prefix}{name}": value
        for name, value in scalars.items()
        if name != "update" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def recorders_of(settings: TrainerSettings, policy: Policy | None) -> list[Recorder]:
    """Return the recorders of a policy's training; a named policy has none but the log and its own TensorBoard."""
    assert isinstance(settings, RecorderSettings)
    recorders: list[Recorder] = []
    if settings.progress:
        recorders.append(ProgressLine())
    config = settings.model_dump(mode="json")
    for package, place in settings.recorders.items():
        if package == "tensorboard":
            recorders.append(TensorBoard(Path(place) if policy is None else Path(place, str(policy.policy_id))))
        elif policy is None:
            tracked = WeightsAndBiases if package == "wandb" else Trackio
            recorders.append(tracked(place, config, settings.policies_dir / f"{package}-run.txt"))
    return recorders


def check_packages(settings: TrainerSettings) -> None:
    """Check that the packages of recorders are installed.

    Raises:
        SettingsError: One is not.
    """
    assert isinstance(settings, RecorderSettings)
    for package in settings.recorders:
        check_package(package)


def check_package(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SettingsError(
            f"recorders names {package!r}, which is not installed: run `pip install {package}`, or leave it out"
        )


def _named(scalars: Scalars, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {_short(scalars[name])}" for name in names if scalars.get(name) is not None)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
