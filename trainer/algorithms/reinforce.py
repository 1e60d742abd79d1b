"""REINFORCE on GRPO's advantages: no ratio and no clip. Williams 1992, sections 4 and 5."""

from __future__ import annotations

from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient
from trainer.batch.ratios import TrainedTokens


class Reinforce(PolicyGradient):
    """The plain policy gradient, for sessions of the version that is trained."""

    name = "reinforce"
    has_ratio = False

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        return -tokens.advantages * tokens.logprobs
