"""What changes the logits of a row's trained tokens before the softmax, as `trainer.batch.logprobs` applies it.

Legend: m trained tokens of a row, C predictors of a chunk, c of them in a run, D some ids, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Scale = tuple[slice, Tensor, Tensor]
"""Rows of a chunk, ids, and the derivative of the changed logits by the given ones there. [c, D]"""


class Processing(Protocol):
    """What is applied to the logits of a row's distinct predictors."""

    def apply(self, logits_CV: Tensor, chunk: slice) -> Sequence[Scale]:
        """Change the float32 logits of a chunk in place; return where their derivative is not 1 or 0."""


class RowLogits(Protocol):
    """The same of a row's trained tokens, before their predictors are known."""

    @property
    def key(self) -> Tensor:
        """A number of its own for each token with a distribution of its own, 0 for the others. [m]."""

    def placed(self, which: Tensor, to_device: Callable[[Tensor], Tensor]) -> Processing:
        """Return the processing of the distinct predictors.

        Args:
            which: The predictor of each token; no other token has that of a processed one. [m]
            to_device: Moves a tensor to the logits' device.
        """


def pull_back(gradient_CV: Tensor, scales: Sequence[Scale]) -> None:
    """Turn the gradient of a chunk's processed logits into that of the given ones, in place.

    A masked id has the probability 0, and so no gradient already.
    """
    for rows, ids, scale_cD in scales:
        gradient_CV[rows, ids] *= scale_cD
