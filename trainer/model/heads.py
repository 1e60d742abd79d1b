"""What an algorithm needs of a row's trained tokens beside their logprobs under the present weights: heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainer.batch.ratios import TrainedTokens
from trainer.model.adapters import Adapter
from trainer.model.inputs import RowInputs
from trainer.model.model import Whole


class Head:
    """One column of the trained tokens, and its own weights where it has any; but for `of`, its defaults do nothing."""

    column: ClassVar[str]
    """Which field of `TrainedTokens` it computes."""
    optimizer: torch.optim.Optimizer | None = None
    start: Adapter | None = None
    """The adapter that the policy started from; None for the base model."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def shard(self, place: Whole) -> None:
        """Hold a model of its own in this way; before `load`."""

    def load(self, seed: int) -> None:
        """Build it, after the policy was loaded."""

    def parameters(self) -> list[nn.Parameter]:
        return []

    def bind(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], learning_rate: float) -> None:
        """Make the optimizer of its own weights, after `load`; the rate is that of the policy."""

    def tensors(self) -> dict[str, Any]:
        """Return what a resume needs of it; not copied."""
        return {}

    def load_tensors(self, tensors: dict[str, Any]) -> None:
        """Load what `tensors` returned."""

    def of(self, inputs: RowInputs, output: Tensor) -> Tensor:
        """Return the column of a row; `output` has the policy's hidden states. [m]."""
        raise NotImplementedError

    def with_loss(self, loss: Tensor, tokens: TrainedTokens) -> Tensor:  # noqa: ARG002  for subclasses
        """Return a row's loss with that of the head."""
        return loss
