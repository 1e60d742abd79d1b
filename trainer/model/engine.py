"""The seam between the loop and the model that it trains: what another distributed engine would have to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm
from trainer.batch.batch import Batch, Reals
from trainer.batch.ratios import Gauges
from trainer.parallel import World
from turnwise.chains import Experience


class TrainingEngine(Protocol):
    """What the loop asks of the model that it trains: the seam at which another engine fits.

    What changes is in the `State` that the loop keeps: the engine makes its parts, and reads and fills its tensors.
    """

    world: World
    """The processes that train together."""
    algorithm: Algorithm
    """Decides what is trained, and with what loss."""

    def load(self, seed: int, *, with_weights: bool = True) -> None:
        """Load the base model, unless a saved state replaces its weights."""

    def gradient(
        self, optimizer: torch.optim.Optimizer, batch: Batch, members: Sequence[int], proximal: Reals | None = None
    ) -> tuple[Gauges, Reals]:
        """Compute the gradient of an optimizer step over the members; return gauges and logprobs. [M]."""

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        """Update the weights; return the gradient's norm, NaN where it was not finite and changed nothing."""

    def logprobs_of(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the logprobs of the members' sampled tokens under the present weights. [M]."""

    def values_of(self, batch: Batch, members: Sequence[int]) -> Reals:
        """Return the critic's values of the members' sampled tokens; only where the algorithm needs them. [M]."""

    def proximal_logprobs(self, batch: Batch, members: Sequence[int]) -> Reals | None:
        """Return the same where the loss takes ratios to the weights at the start of a batch. [M]."""

    def why_untrainable(self, experience: Experience) -> str | None:
        """Return why the model cannot compute a chain; None where it can."""

    def export(self) -> dict[str, Tensor]:
        """Return a version's weights, whole and on the CPU, in all processes together; empty in all but the first."""
