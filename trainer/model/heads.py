"""What an algorithm needs of a row's trained tokens beside their logprobs under the present weights: heads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from trainer.batch.ratios import TrainedTokens
from trainer.model.adapters import Adapter
from trainer.model.inputs import RowInputs
from trainer.model.model import Policy, Whole


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


class Reference(Head):
    """The logprobs under what the policy started from."""

    column = "reference"

    def __init__(self, policy: Policy, own: Policy | None) -> None:
        """`own` is a second model in memory; None for a policy with an adapter, which is taken away meanwhile."""
        self._policy = policy
        self._own = own

    def shard(self, place: Whole) -> None:
        if self._own is not None:
            self._own.place = place

    def load(self, seed: int) -> None:
        if self._own is not None:
            self._own.load(seed)
            self._own.model.requires_grad_(requires_grad=False)

    def of(self, inputs: RowInputs, output: Tensor) -> Tensor:  # noqa: ARG002  it has a forward pass of its own
        with torch.no_grad(), self._started():
            return (self._own or self._policy).logprobs(inputs)[0]

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        """Let the policy's adapter be the one that it started from in the block, or none."""
        model = cast("Any", self._policy.model)
        if self._own is not None:
            yield
        elif self.start is None:
            with model.disable_adapter():
                yield
        else:
            present = Adapter.in_place(model)
            self.start.put()
            try:
                yield
            finally:
                present.put()
