"""Every setting of the trainer: `[trainer]` of `turnwise.toml`, `TURNWISE_TRAINER_*`, the flags of `turnwise train`.

They are listed here by what they decide. Those of the selection alone, which algorithms know, stand in
`trainer/batch/selection.py`, and those of an algorithm in its class.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Literal

import safetensors
from pydantic import Field, SecretStr, model_validator

from trainer.algorithms.loading import DEFAULT, ByName
from trainer.batch.selection import SelectionRule
from turnwise.types import TRAINED_ROLES, Json, PolicyKind, Role
from turnwise.version_directory import weight_files

RATES = {30_000_000: (3e-4, 3e-3), 300_000_000: (1e-5, 1e-4), sys.maxsize: (1e-6, 1e-5)}
"""Default of `learning_rate` for a model below a number of parameters: for all weights, and for an adapter."""


class TrainerSettings(SelectionRule):
    """The settings of one trainer process."""

    # What is trained, and where it is kept
    database: SecretStr = SecretStr("sqlite:///turnwise.db")
    """URL of the ledger. Secret, because it may hold a password."""
    model: str = ""
    """Directory or Hub name of the base model, which is policy version 0. Required to train."""
    kind: PolicyKind = PolicyKind.FULL
    """`full` trains and publishes all weights, `lora` an adapter."""
    algorithm: ByName = Field(default=DEFAULT)  # type: ignore[assignment]  # its validator loads it
    """The algorithm: its name, `module:Class` for one of your own, or the table `[trainer.algorithm]` with `name` and
    its settings. docs/algorithms.md lists the algorithms."""
    policies_dir: Path = Path("policies")
    """Directory of the policy versions; engines must see it under the same path."""
    seed: int = 0

    # When a batch is claimed, and of what
    trainer_id: str = "trainer"
    """Name under which groups are claimed. A process that restarts under it takes over the groups that it held."""
    groups_per_batch: int = Field(default=32, ge=1)
    """Groups of a whole batch, which is trained at once. A quarter of it is the smallest batch: fewer groups are no
    evidence for a new version, however long they wait."""
    singles_per_group: int = Field(default=8, ge=1)
    """Single sessions that fill the place of one group."""
    wait_seconds: float | None = 300.0
    """How long to wait for a whole batch once a group or single session is ready; then a smaller batch is trained, as
    soon as it is large enough. None has no limit. The first batch of a run waits five seconds at most."""
    refill_seconds: float | None = Field(default=None, ge=0)
    """How long a batch waits for groups in the place of those whose rewards are all equal, which teach nothing. None:
    only a batch of which less than a quarter has an advantage waits, until it is a quarter, and at most `wait_seconds`
    or a minute."""
    train_roles: list[Role] = Field(default=[role for role in Role if role in TRAINED_ROLES])
    """Roles of chains whose turns are trained; turns of other roles stay in the prompts."""

    # When training waits
    max_staleness: int | None = Field(default=None, ge=0)
    """Groups with a turn that is older than this many versions are dropped, with a line in the log. 0 is strictly on
    policy; None drops nothing."""

    # How a batch is trained
    learning_rate: float = Field(default=1e-6, gt=0)
    """By default by size and kind: 1e-6 for all weights, as published recipes for models of 0.5 to 70 billion
    parameters use, 1e-5 below 300 million parameters, 3e-4 below 30 million; for LoRA ten times as much."""
    betas: tuple[float, float] = (0.9, 0.95)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam; a larger value makes smaller steps where gradients are tiny."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate over `total_batches` batches; `constant` needs no `total_batches`."""
    num_warmup_updates: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    num_minibatches: int = Field(default=4, ge=1)
    """Optimizer steps in one pass over a batch."""
    reuse_epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""
    total_batches: int | None = Field(default=None, ge=1)
    """Batches to train, counted across restarts; None trains until the process is stopped."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    row_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one packed row, which bounds memory. None: 512 on a CPU, where longer rows cost more, else 8192."""

    # How the model is held and computed
    device: str = "auto"
    """`auto` is CUDA where it is available, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation; the optimizer's state stays in float32. `auto`: bfloat16 on CUDA, else float32."""
    attention: Literal["auto", "flex_attention", "sdpa", "eager"] = "auto"
    """Attention implementation of transformers. `auto`: FlexAttention on CUDA, which skips what the tokens of a packed
    row do not see, else SDPA, else `eager`. On a CPU FlexAttention has no backward."""
    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in memory. `bfloat16` halves them, and the optimizer keeps float32 masters; for one
    process. Several processes shard float32 weights, and compute with copies in bfloat16 already."""
    lora_rank: int = Field(default=16, ge=1)
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; by default all of the language model that engines serve adapters
    of, which `turnwise train --dry-run` lists."""
    vision: Literal["frozen", "projector", "all"] = "frozen"
    """What of a model that sees is trained beside its language model, with `kind = "full"`: nothing, what turns images
    into embeddings, or the vision tower too."""
    compile: bool = False
    """Compile the forward pass. It slows the start and pays in long runs."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of torch on a CPU; None is torch's own choice. Leave cores to an engine on the same machine: threads that
    wait for a busy core slow each other down. Another number changes the last bits of the weights."""

    # Versions on disk and in engines
    checkpoint_every: int = Field(default=1, ge=1)
    """Versions between two states of the trainer on disk. A state is written in the background, and batches are
    acknowledged with the state that contains them. A crash costs up to twice as many batches, which are trained
    again."""
    keep_versions: int = Field(default=3, ge=1)
    """Versions that stay on disk, besides the active, the pinned and the newest one."""
    keep_every: int | None = Field(default=None, ge=1)
    """Versions whose number is a multiple of this stay on disk for good."""

    # The process
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        rates = _default_rates(str(values.get("model") or ""))
        return {"learning_rate": rates[values.get("kind") == PolicyKind.LORA]} | values

    def saved(self) -> Json:
        return self.model_dump(mode="json", exclude={"database"})


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
