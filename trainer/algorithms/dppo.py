"""DPPO: tokens are masked by how far their probability has moved, not by their ratio.

Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (arXiv:2602.04879), the Binary-TV variant.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient
from trainer.batch.ratios import TrainedTokens, anchor, ratio_of

MAX_RATIO = 20.0
"""Bound of the importance ratio, as in verl."""


class DPPO(PolicyGradient):
    """Divergence PPO."""

    name = "dppo"

    class Settings(PolicyGradient.Settings):
        clip_low: float = Field(default=0.2, ge=0)
        """How far it may fall."""
        clip_high: float = Field(default=0.28, ge=0)
        """How far it may rise."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        settings = self.settings
        return dppo(tokens.logprobs, anchor(tokens), tokens.advantages, settings.clip_low, settings.clip_high)

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:
        settings = self.settings
        masked = blocked(tokens.logprobs, anchor(tokens), tokens.advantages, settings.clip_low, settings.clip_high)
        return {"clip_fraction": masked}


def dppo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return −M r A, masked where the *probability* has moved too far and would move on.

    The binary total variation |π − μ| takes the place of the ratio, which punishes rare tokens. The mask does not bound
    the ratio of rare tokens, so the ratio is truncated, and with it the weight of the gradient.
    """
    weight = ratio_of(logprobs, old).detach().clamp(max=MAX_RATIO)
    masked = blocked(logprobs, old, advantages, low, high)
    return -torch.where(masked, 0.0, weight * torch.exp(logprobs - logprobs.detach())) * advantages


def blocked(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    moved = logprobs.detach().exp() - old.exp()
    return ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))
