"""GSPO: one ratio a chain. Zheng et al. 2025 (arXiv:2507.18071)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient, cut_off, ppo_clip
from trainer.batch.batch import Aggregation
from trainer.batch.ratios import TrainedTokens, anchor, ratio_of, sequence_mean


class GSPO(PolicyGradient):
    """Group Sequence Policy Optimization, with the paper's bounds."""

    name = "gspo"

    class Settings(PolicyGradient.Settings):
        aggregation: Aggregation = "session_mean"
        """How tokens are weighed: `token_mean`, `session_mean` or `session_sum`."""
        clip_low: float = Field(default=3e-4, ge=0)
        """Lower bound of the ratio: 1 − clip_low."""
        clip_high: float = Field(default=4e-4, ge=0)
        """Upper bound of the ratio: 1 + clip_high."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        return ppo_clip(_ratio(tokens), tokens.advantages, self.settings.clip_low, self.settings.clip_high)

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:
        settings = self.settings
        return {"clip_fraction": cut_off(_ratio(tokens), tokens.advantages, settings.clip_low, settings.clip_high)}


def _ratio(tokens: TrainedTokens) -> Tensor:
    return gspo_ratio(tokens.logprobs, anchor(tokens), tokens.sequence)


def gspo_ratio(logprobs: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
    """Return each token's sequence ratio, the geometric mean over its chain, with the token's own gradient.

    Eq. 7 for the ratio and eq. 14 for the gradient by token: the value is the sequence's, the gradient flows through
    the token's logprob.
    """
    log_ratio = sequence_mean(logprobs.detach() - old, sequence)
    return ratio_of(logprobs - logprobs.detach() + log_ratio[sequence], torch.zeros_like(old))
