"""TOPR: good samples are imitated however old they are, bad ones count in proportion to how probable they still are.

Le Roux et al. 2025 (arXiv:2503.14286).
"""

from __future__ import annotations

import torch
from pydantic import field_validator
from torch import Tensor

from trainer.algorithms.grpo import PolicyGradient
from trainer.batch.batch import Aggregation
from trainer.batch.ratios import TrainedTokens, sequence_log_ratio


class TOPR(PolicyGradient):
    """Tapered Off-Policy REINFORCE."""

    name = "topr"

    class Settings(PolicyGradient.Settings):
        aggregation: Aggregation = "session_mean"
        """How tokens are weighed: `token_mean`, `session_mean` or `session_sum`."""

        @field_validator("correction")
        @classmethod
        def _has_the_ratio_itself(cls, value: str | None) -> str | None:
            if value is not None:
                raise ValueError(
                    f"topr weighs by the ratio to what sampled itself, and correction={value!r} would weigh by it "
                    "once more: leave `correction` out"
                )
            return value

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        log_ratio = sequence_log_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.sequence)
        return topr(tokens.logprobs, log_ratio, tokens.advantages)


def topr(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return −w A log π with w = 1 where A > 0 and w = sg(min(ρ, 1)) elsewhere, ρ the ratio of the whole chain.

    `log_ratio` is each token's log ρ. [M]
    """
    tapered = log_ratio.detach().clamp(max=0.0).exp()
    return -torch.where(advantages > 0, torch.ones_like(tapered), tapered) * advantages * logprobs
