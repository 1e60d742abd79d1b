"""Masked importance sampling: tokens whose ratio is out of bounds are left out, both ways.

The mask is that of IcePop (Ling Team 2025, arXiv:2510.18855), which puts it on the ratio between trainer and engine and
clips the trainer's own ratio as PPO does; here one ratio, to the behaviour, carries both.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient, out_of_bounds, ratio
from trainer.batch.ratios import TrainedTokens


class MaskedIS(PolicyGradient):
    """The policy gradient of the tokens within IcePop's bounds [0.5, 5]."""

    name = "masked_is"

    class Settings(PolicyGradient.Settings):
        clip_low: float = Field(default=0.5, ge=0)
        """Lower bound of the ratio: 1 − clip_low."""
        clip_high: float = Field(default=4.0, ge=0)
        """Upper bound of the ratio: 1 + clip_high."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        settings = self.settings
        low, high = settings.clip_low, settings.clip_high
        return masked_importance(tokens.logprobs, ratio(tokens), tokens.advantages, low, high)

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:
        return {"clip_fraction": out_of_bounds(ratio(tokens), self.settings.clip_low, self.settings.clip_high)}


def masked_importance(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    return -torch.where(inside, ratio.detach(), 0.0) * advantages * logprobs
