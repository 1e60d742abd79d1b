"""Imported sessions mixed into reinforcement learning: the loss is (1 − μ) L_RL + μ L_imported (CHORD).

Zhang et al. 2025, "On-Policy RL Meets Off-Policy Experts" (CHORD, arXiv:2508.11408). Each part is a mean over its own
tokens, and their weights contain μ. So sampled and imported chains share packed rows, and the loss of a row is a sum.
Legend: M trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from trainer.learning.batch import Aggregation, Batch, Reals
from trainer.learning.losses import LossRule, preference_loss, sft
from trainer.learning.ratios import TrainedTokens


class MixingRule(LossRule):
    """Whether imported sessions are trained beside sampled ones, and with what weight."""

    mix_imported: Literal["sft", "dpo"] | None = None
    """Loss of imported sessions that are mixed into each batch: `sft` imitates those with at least `sft_min_reward`,
    `dpo` trains pairs of a better and a worse one. None does not use them."""
    mix_groups: int = Field(default=8, ge=1)
    """Imported groups of a batch, drawn again for each batch. Without groups in the import, a session is a group."""
    mix_mu: float = Field(default=0.1, ge=0, le=1)
    """CHORD's μ at its peak: the weight of the imported sessions' loss; that of the policy loss is 1 − μ."""
    mix_mu_end: float = Field(default=0.05, ge=0, le=1)
    """μ after `mix_decay_batches`."""
    mix_warmup_batches: int = Field(default=0, ge=0)
    """Batches over which μ rises linearly to `mix_mu`."""
    mix_decay_batches: int = Field(default=0, ge=0)
    """Batches over which μ then falls to `mix_mu_end`, as half a cosine; 0 leaves it at `mix_mu`."""
    mix_phi: bool = False
    """Weight each imported token by φ = p (1 − p), p its probability, with `sft`: certain and unlikely tokens count
    less."""

    @model_validator(mode="after")
    def _mixing_fits(self) -> Self:
        if self.mix_imported is not None and self.algorithm in ("sft", "dpo"):
            raise ValueError(
                f"algorithm={self.algorithm!r} trains imported sessions already: remove mix_imported, or set the "
                "algorithm of the policy loss, such as 'ppo'"
            )
        if self.mix_imported == "dpo" and self.dpo_reference == "behaviour":
            raise ValueError(
                "mix_imported='dpo' with dpo_reference='behaviour': no policy sampled imported sessions; set "
                "dpo_reference='base'"
            )
        if self.mix_imported == "dpo" and self.mix_phi:
            raise ValueError(
                "mix_phi=true weighs the tokens of mix_imported='sft', and it is 'dpo': remove one of them"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a term needs the base model's logprobs."""
        return super().needs_reference or self.mix_imported == "dpo"


def mu_of(num_batches: int, rule: MixingRule) -> float:
    """Return μ after so many batches: a linear rise to the peak, then half a cosine down to the end (CHORD-μ)."""
    if num_batches < rule.mix_warmup_batches:
        return rule.mix_mu * (num_batches + 1) / (rule.mix_warmup_batches + 1)
    if not rule.mix_decay_batches:
        return rule.mix_mu
    decayed = min((num_batches - rule.mix_warmup_batches) / rule.mix_decay_batches, 1.0)
    return rule.mix_mu_end + (rule.mix_mu - rule.mix_mu_end) * (1 + math.cos(math.pi * decayed)) / 2


def phi(logprobs: Tensor) -> Tensor:
    """Return p (1 − p) without gradient, the weight of an imported token (CHORD-φ). [M]."""
    probability = logprobs.detach().exp()
    return probability * (1 - probability)


def imported_loss(tokens: TrainedTokens | None, rule: MixingRule) -> Tensor | float:
    """Return the share of the imported tokens in the optimizer step's loss; 0 without any."""
    if tokens is None:
        return 0.0
    if rule.mix_imported == "dpo":
        return preference_loss(tokens, rule)
    loss_M = sft(tokens.logprobs)
    if rule.mix_phi:
        loss_M = phi(tokens.logprobs) * loss_M
    return (tokens.weights * loss_M).sum()


def parts(tokens: TrainedTokens, is_imported: Tensor | None) -> tuple[TrainedTokens, TrainedTokens | None]:
    """Return the sampled tokens of a row, and the imported ones; None where the batch has none."""
    if is_imported is None:
        return tokens, None
    return tokens.subset(~is_imported), tokens.subset(is_imported)


def step_weights(
    batch: Batch, members: Sequence[int], rule: MixingRule, aggregation: Aggregation, session_tokens: int
) -> Reals:
    """Return the weight of every trained token in the optimizer step over `members`. [M]."""
    imported = [member for member in members if batch.is_imported(member)]
    if not imported:
        return batch.weights(members, aggregation, session_tokens)
    sampled = [member for member in members if not batch.is_imported(member)]
    own: Aggregation = "session_mean" if rule.mix_imported == "dpo" else "token_mean"
    weights: Reals = (1 - batch.mu) * batch.weights(sampled, aggregation, session_tokens)
    return weights + batch.mu * batch.weights(imported, own, session_tokens)
