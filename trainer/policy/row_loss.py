"""The loss of each row, and the agreement of all processes where a custom loss refuses the batch.

The other processes expect the backward pass of every row, so a refused row gets a loss of 0, and all processes refuse
the batch together after its last row.
"""

from __future__ import annotations

from torch import Tensor

from trainer.learning.imports import import_function
from trainer.learning.losses import LossRule, loss_of
from trainer.learning.ratios import TrainedTokens
from trainer.parallel import World
from turnwise.errors import BatchRefused


class RowLoss:
    """The loss that the settings ask for."""

    def __init__(self, rule: LossRule) -> None:
        self._rule = rule
        self._custom = None if rule.custom_loss is None else import_function(rule.custom_loss, "custom_loss")
        self._refusal: str | None = None
        """Why the custom loss refused a row of this process since the last agreement."""

    def of(self, tokens: TrainedTokens) -> Tensor:
        """Return the loss of a row's sampled tokens; 0 without any, or if the custom loss refuses them.

        A row of imported chains alone has none, and a custom loss may need one: for the largest index of a chain.
        """
        if not len(tokens.logprobs):
            return tokens.logprobs.sum()
        try:
            return loss_of(tokens, self._rule, self._custom)
        except BatchRefused as error:
            self._refusal = self._refusal or str(error)
            return (tokens.logprobs * 0.0).sum()

    def agree(self, world: World) -> None:
        """Refuse the batch if a process refused one of its rows; all processes call this after their last row.

        Raises:
            BatchRefused: One did.
        """
        if self._custom is None:
            return
        own, self._refusal = self._refusal, None
        reasons = [reason for reason in world.gather(own) if reason is not None]
        if reasons:
            raise BatchRefused(reasons[0])
