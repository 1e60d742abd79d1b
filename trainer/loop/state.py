"""All that changes while training, in one record that is saved whole.

Randomness is derived from the seed and the count of batches, never carried along, so a batch that is
done again after a crash draws the same numbers, whatever was drawn before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from trainer.policy.model import Policy
from turnwise.types import Json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counts of a run."""

    seed: int
    num_batches: int = 0
    """Claims acked, the refused ones included; the last `update_id` in the ledger."""
    num_optimizer_steps: int = 0
    """A batch, which the ledger calls an update, takes one or more."""
    policy_version: int = 0
    """The version that the weights are."""
    num_groups: int = 0
    num_sessions: int = 0
    num_tokens: int = 0
    """Sampled tokens that carried loss."""
    num_refused_groups: int = 0
    """Groups that were claimed and not trained on, for whatever reason."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `setup` makes and `step` takes and gives.

    The tensors behind `policy`, `optimizer` and `scheduler` are updated in place, since torch binds an optimizer to
    them: a `State` that was given to `step` is spent, as a donated buffer is.
    """

    progress: Progress
    policy: Policy
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    metrics: Json = dataclasses.field(default_factory=dict)
    """Gauges of the latest batch."""
    buffer: Json = dataclasses.field(default_factory=dict)
    """The replay buffer's index; empty on policy."""

    def rng(self) -> np.random.Generator:
        """Return the random numbers of the coming batch, and seed torch with them."""
        sequence = np.random.SeedSequence([self.progress.seed, self.progress.num_batches])
        torch.manual_seed(int(sequence.generate_state(1)[0]))
        return np.random.default_rng(sequence)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resume needs, as tensors and plain values on the CPU."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {
            "progress": dataclasses.asdict(self.progress),
            "model": self.policy.trained_state(),
            "optimizer": get_optimizer_state_dict(self.policy.model, self.optimizer, options=options),
            "scheduler": self.scheduler.state_dict(),
            "metrics": self.metrics,
            "buffer": self.buffer,
        }

    def restored(self, saved: dict[str, Any]) -> State:
        """Return this state with everything that was saved in its place."""
        self.policy.load_trained_state(saved["model"])
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(
            self.policy.model, self.optimizer, cast("dict[str, Any]", saved["optimizer"]), options=options
        )
        self.scheduler.load_state_dict(saved["scheduler"])
        progress = dict(saved["progress"])
        if "num_updates" in progress:  # as releases before 0.2 named it
            progress["num_optimizer_steps"] = progress.pop("num_updates")
        return dataclasses.replace(
            self, progress=Progress(**progress), metrics=saved["metrics"], buffer=saved["buffer"]
        )
