"""Every setting of the trainer: `[trainer]` of `turnwise.toml`, `TURNWISE_TRAINER_*`, the flags of `turnwise train`.

A part of the trainer declares its settings in a rule, with defaults, limits and descriptions. This class
inherits from all rules and adds the settings of the loop, so each setting is declared once, and a part receives the
settings under its own rule's type.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
from pydantic import Field, SecretStr, model_validator

from trainer.batch.optimizer import OptimizerRule
from trainer.batch.selection import SelectionRule
from trainer.checks.gate import GateRule
from trainer.claims.pacing import SourceRule
from trainer.model.agent import AgentRule
from trainer.model.model import PolicySpec
from trainer.publish.weight_server import WeightRule
from turnwise.settings import FromJson
from turnwise.types import Json, PolicyKind
from turnwise.version_directory import weight_files

RATES = {30_000_000: (3e-4, 3e-3), 300_000_000: (1e-5, 1e-4), sys.maxsize: (1e-6, 1e-5)}
"""Default of `learning_rate` for a model below so many parameters: for all weights, and for an adapter."""


class TrainerSettings(SourceRule, OptimizerRule, SelectionRule, AgentRule, GateRule, PolicySpec, WeightRule):
    """The settings of one trainer process."""

    database: SecretStr = SecretStr("sqlite:///turnwise.db")
    """URL of the ledger. Secret, because it may hold a password."""
    policies_dir: Path = Path("policies")
    """Directory of the policy versions; engines must see it under the same path."""
    workflow: Literal["on_policy", "off_policy"] = "on_policy"
    seed: int = 0
    compile: bool = False
    """Compile the forward pass. It slows the start and pays in long runs."""
    multi_devices: bool = False
    """Shard over all processes that `torchrun` started."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of torch on a CPU; None is torch's own choice. Leave cores to an engine on the same machine: threads that
    wait for a busy core slow each other down. Another number changes the last bits of the weights."""

    buffer_groups: int = Field(default=512, ge=1)
    """Off policy: groups that the replay buffer holds; the oldest ones leave first."""
    buffer_min_groups: int = Field(default=32, ge=1)
    """Off policy: groups that the buffer must hold before the first update."""
    buffer_sampling: Literal["uniform", "recency", "priority"] = "uniform"

    checkpoint_every: int = Field(default=1, ge=1)
    """Versions between two states of the trainer on disk. A state is written in the background, and batches are
    acknowledged with the state that contains them. A crash costs up to twice as many batches, which are trained
    again."""
    keep_versions: int = Field(default=3, ge=1)
    """Versions that stay on disk, besides the active, the pinned and the newest one."""
    keep_every: int | None = Field(default=None, ge=1)
    """Versions whose number is a multiple of this stay on disk for good."""
    keep_best: int = Field(default=0, ge=0)
    """So many versions with the best evaluations stay on disk, by mean reward."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Batches between evaluations; None never evaluates."""
    evaluation_command: tuple[str, ...] = ()
    """Command that plays held-out tasks through the proxy, in sessions of split `eval`. Empty: only read the eval
    sessions that others played."""
    evaluation_seconds: float = Field(default=600.0, gt=0, le=365 * 86400)
    """Time limit of the evaluation command."""
    proxy_url: str = "http://127.0.0.1:8100"
    """Address of the proxy, which evaluation commands get with a key and the version in their environment."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_kind(cls, values: Any) -> Any:
        """Fill in the defaults that depend on another setting."""
        if not isinstance(values, dict):
            return values
        rates = _default_rates(str(values.get("model") or ""))
        return {"learning_rate": rates[values.get("kind") == PolicyKind.LORA]} | values

    def saved(self) -> Json:
        """Return the settings that go into a checkpoint, as plain values without secrets."""
        return self.model_dump(mode="json", exclude={"database"})

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    progress: bool = True
    """Log one line a batch: version, reward, groups, seconds and gauges."""
    recorders: Annotated[dict[Literal["tensorboard", "wandb", "trackio"], str], FromJson] = Field(default_factory=dict)
    """Where else numbers are written, by the package: a directory of event files for TensorBoard, a project of
    Weights & Biases or of trackio."""


def _default_rates(model: str) -> tuple[float, float]:
    size = num_parameters(Path(model)) if model and Path(model).is_dir() else 0
    return next(rates for limit, rates in RATES.items() if 0 < size < limit or limit == sys.maxsize)


def num_parameters(directory: Path) -> int:
    """Return the number of weights in a model's directory, from the heads of its files; 0 where none can be read."""
    total = 0
    for path in weight_files(directory):
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, safetensors.SafetensorError):
            return 0  # the load names what is wrong with the file
    return total
