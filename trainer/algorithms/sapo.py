"""SAPO: a soft gate in place of the clip. Gao et al. 2025 (arXiv:2511.20347)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient, ratio
from trainer.batch.ratios import TrainedTokens


class SAPO(PolicyGradient):
    """Soft Adaptive Policy Optimization."""

    name = "sapo"

    class Settings(PolicyGradient.Settings):
        temperatures: tuple[float, float] = (1.0, 1.05)
        """Temperature of the gate for positive and for negative advantages."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        return sapo(ratio(tokens), tokens.advantages, self.settings.temperatures)


def sapo(ratio: Tensor, advantages: Tensor, temperatures: tuple[float, float]) -> Tensor:
    """Return −(4 / τ) σ(τ (r − 1)) A: steeper for negative advantages."""
    positive, negative = temperatures
    tau = torch.where(advantages > 0, positive, negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
