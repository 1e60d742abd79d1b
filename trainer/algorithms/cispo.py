"""CISPO: the weight is clipped, and no token loses its gradient. MiniMax 2025 (arXiv:2506.13585)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient, out_of_bounds, ratio
from trainer.batch.ratios import TrainedTokens


class CISPO(PolicyGradient):
    """Clipped IS-weight Policy Optimization, by default without a lower bound."""

    name = "cispo"

    class Settings(PolicyGradient.Settings):
        clip_low: float = Field(default=1.0, ge=0)
        """Lower bound of the weight: 1 − clip_low."""
        clip_high: float = Field(default=0.5, ge=0)
        """Upper bound of the weight: 1 + clip_high."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        settings = self.settings
        return cispo(tokens.logprobs, ratio(tokens), tokens.advantages, settings.clip_low, settings.clip_high)

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:
        return {"clip_fraction": out_of_bounds(ratio(tokens), self.settings.clip_low, self.settings.clip_high)}


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -ratio.detach().clamp(1 - low, 1 + high) * advantages * logprobs
