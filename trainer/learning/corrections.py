"""Weights that correct for samples of another policy: an engine that differs from the trainer, or an older version.

All of them multiply the loss of a token and carry no gradient. Legend: M trained tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.learning.ratios import TrainedTokens, ratio_of, sequence_log_ratio, sequence_mean
from turnwise.settings import Settings


class CorrectionRule(Settings):
    """Which corrections apply, and their bounds."""

    tis_cap: float | None = Field(default=None, gt=0)
    """Cap of truncated importance sampling between the trainer's weights at the start of a batch and the policy that
    sampled. Ratios of the loss are then taken to the weights at the start of the batch, with one more forward pass.
    None turns it off."""
    mis_cap: float | None = Field(default=None, gt=0)
    """Masked importance sampling: leave out what has a ratio above this; None turns it off."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whether `tis_cap` and `mis_cap` apply to the ratio of each token or to that of its whole chain."""
    off_policy_mask: float | None = Field(default=None, gt=0)
    """Leave out chains with a negative advantage whose tokens became this much less probable on average, in nats,
    since they were sampled; None turns it off."""


def truncated_importance(ratio: Tensor, cap: float) -> Tensor:
    """Return min(ρ, cap).

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; with PPO it is the
    decoupled loss of Hilton et al. 2022 (arXiv:2110.00641).
    """
    return ratio.clamp(max=cap)


def masked_importance_sampling(ratio: Tensor, cap: float) -> Tensor:
    """Return ρ where ρ ≤ cap, else 0: what the trainer would sample much more often than the engine is left out.

    Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".
    """
    return torch.where(ratio <= cap, ratio, 0.0)


def off_policy_sequences(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, sequence: Tensor, bound: float
) -> Tensor:
    """Return 0 for chains with a negative advantage and mean(log μ − log π) > bound, else 1. [M].

    DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv:2512.02556), off-policy sequence masking.
    """
    moved = sequence_mean(behaviour - logprobs.detach(), sequence)[sequence]
    bad = sequence_mean(advantages, sequence)[sequence] < 0
    return torch.where(bad & (moved > bound), 0.0, 1.0)


def importance_gate(tokens: TrainedTokens, rule: CorrectionRule) -> Tensor | float:
    """Return which tokens the off-policy sequence mask keeps."""
    if rule.off_policy_mask is None:
        return 1.0
    return off_policy_sequences(
        tokens.logprobs, tokens.behaviour, tokens.advantages, tokens.sequence, rule.off_policy_mask
    )


def correction(tokens: TrainedTokens, rule: CorrectionRule) -> Tensor | float:
    """Return the truncated or masked ratio of the proximal policy to the behaviour policy."""
    if rule.tis_cap is None and rule.mis_cap is None:
        return 1.0
    proximal = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    if rule.importance_level == "sequence":
        ratio = sequence_log_ratio(proximal, tokens.behaviour, tokens.sequence).exp()
    else:
        ratio = ratio_of(proximal, tokens.behaviour)
    kept = ratio if rule.mis_cap is None else masked_importance_sampling(ratio, rule.mis_cap)
    return kept if rule.tis_cap is None else truncated_importance(kept, rule.tis_cap)
