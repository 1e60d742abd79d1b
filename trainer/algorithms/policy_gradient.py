"""What policy gradients share: which groups are trained, single sessions, corrections, entropy and KL.

A subclass gives `policy_loss`, and `advantages` where a group is not compared by GRPO's rule.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Chain, Group, Weighed, needed
from trainer.learning.advantages import (
    PastValues,
    Row,
    by_bucket,
    compared,
    groups_of,
    is_single,
    past_values,
    single_rows,
    uniform_groups,
)
from trainer.learning.ratios import (
    CorrectionRule,
    TrainedTokens,
    anchor,
    correction,
    importance_gate,
    ratio_of,
    to_go,
)
from trainer.learning.selection import Offer, Selection, check_advantages, without_advantage
from turnwise.comparison import Floats, normalised


class PolicyGradient(Weighed):
    """A loss of advantages and importance ratios."""

    class Settings(Weighed.Settings, CorrectionRule):
        """The settings that all policy gradients have."""

        entropy_coef: float = 0.0
        """Weight of the entropy bonus."""
        kl_coef: float = Field(default=0.0, ge=0)
        """Weight of the KL to the base model. Above 0, full training holds the base model in memory beside the policy;
        LoRA uses its own base."""
        kl_in: Literal["loss", "reward"] = "loss"
        """Add the KL to the loss, or subtract it from the advantages: from each token, the KL of all later ones."""

    settings: Settings

    has_ratio: bool = True
    """Whether the loss carries the importance ratio itself."""
    compares_singles: bool = True
    """Whether single sessions are compared with others of their kind; else `advantages` gets each as a group."""
    scales_singles: bool = True
    """Whether their advantages are divided by the spread of their kind, as groups are whose deviation is 1."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.needs_reference = settings.kl_coef > 0
        self.needs_proximal = self.has_ratio and settings.correction is not None

    def choose(self, offer: Offer) -> Selection:
        """Choose the groups with an advantage. Turns that are left out still count in their group's baseline."""
        rows = self.single_rows(offer)
        past = past_values(offer.window, rows)
        advantages = self.assign(offer, past)
        uniform = set() if self.credits_tokens else uniform_groups(offer.experiences, advantages)
        kept = [
            (experience, turns)
            for experience, turns, reason in zip(offer.experiences, advantages, offer.reasons, strict=True)
            if reason is None and experience.group_key not in uniform
        ]
        return Selection(
            experiences=[experience for experience, _ in kept],
            advantages=[turns for _, turns in kept],
            refused=without_advantage(offer, uniform, rows, past) | offer.refused,
            single_rows=rows,
        )

    def assign(self, offer: Offer, past: PastValues) -> list[Floats]:
        """Return the advantages of every experience, of each turn [K] or of each token [L].

        Args:
            offer: What may be trained.
            past: Values of earlier single sessions.
        """
        found: list[Floats] = [np.empty(0)] * len(offer.experiences)
        singles = [n for n, one in enumerate(offer.experiences) if self.compares_singles and is_single(one)]
        for members in groups_of(offer.experiences, set(singles)):
            group = Group([Chain(offer.experiences[member]) for member in members])
            for member, advantages in zip(members, self.advantages(group), strict=True):
                found[member] = np.asarray(advantages, np.float64)
                check_advantages(offer.experiences[member], found[member])
        those = compared([offer.experiences[n] for n in singles], offer.kind_pattern)
        of_singles = by_bucket(those.values, those.buckets, self.centre, past, is_scaled=self.scales_singles)
        for member, advantages in zip(singles, those.of_turns(of_singles), strict=True):
            found[member] = advantages
        return found

    def advantages(self, group: Group) -> Sequence[Floats]:
        """Return the advantages of each chain of a group, of each of its turns [K] or of each of its tokens [L]."""
        those = compared(group.experiences)
        return those.of_turns(by_bucket(those.values, those.buckets, self.centre))

    def centre(self, values: Floats) -> Floats:
        """Return the advantages of values that are compared with each other: of sessions, or of turns at one step."""
        return normalised(values)

    def single_rows(self, offer: Offer) -> list[Row]:
        """Return the values of the single sessions, which later ones of their kind are compared with."""
        if not self.compares_singles:
            return []
        return single_rows(offer.experiences, offer.kind_pattern)

    @abc.abstractmethod
    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        """Return the loss of each token without corrections and penalties. [M]."""

    def loss(self, tokens: TrainedTokens) -> Tensor:
        """Return the policy loss with its corrections, the entropy bonus and the KL."""
        settings = self.settings
        if settings.kl_coef and settings.kl_in == "reward":
            tokens.advantages = kl_in_advantages(tokens, settings.kl_coef)
        loss_M = self.policy_loss(tokens) * importance_gate(tokens, settings) * self._correction(tokens)
        if settings.entropy_coef:
            loss_M = loss_M - settings.entropy_coef * tokens.entropy
        if settings.kl_coef and settings.kl_in == "loss":
            loss_M = loss_M + settings.kl_coef * kl(tokens.logprobs, needed(tokens.reference))
        return loss_M

    def _correction(self, tokens: TrainedTokens) -> Tensor | float:
        """Return the weight that corrects for the policy that sampled; 1 where the loss carries that ratio itself."""
        if tokens.proximal is None and self.has_ratio:
            return 1.0
        return correction(tokens, self.settings)


def ratio(tokens: TrainedTokens) -> Tensor:
    """Return π / π_old of each token, π_old being that of the start of the batch where it is known. [M]."""
    return ratio_of(tokens.logprobs, anchor(tokens))


def out_of_bounds(ratio: Tensor, low: float, high: float) -> Tensor:
    """Return where the ratio is not in [1 − low, 1 + high]. [M]."""
    return (ratio > 1 + high) | (ratio < 1 - low)


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """Return −min(r A, clip(r, 1 − low, 1 + high) A), and −c A instead where A < 0 and that is smaller.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7; low < high is clip-higher, Yu et al. 2025 (DAPO,
    arXiv:2503.14476), eq. 10; c is the dual clip, Ye et al. 2020 (arXiv:1912.09729).
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cut_off(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where PPO's clip cuts the gradient off. [M]."""
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(π ‖ π_ref) a token, from samples of π. Schulman 2020, "Approximating KL divergence".

    The estimate is its k3 = e^d − d − 1 with d = log π_ref − log π, unbiased and never negative. Its gradient is
    that of KL(π_ref ‖ π), as in GRPO's paper; `kl_in = "reward"` has the gradient of KL(π ‖ π_ref).
    """
    difference = (reference - logprobs).clamp(-20.0, 20.0)
    return torch.expm1(difference) - difference


def kl_in_advantages(tokens: TrainedTokens, coefficient: float) -> Tensor:
    """Return A_t − β Σ_{t' ≥ t} log(π / π_ref)_{t'} over the chain, without gradient: the KL as part of the reward.

    The policy gradient of −β KL over whole chains: each token answers for the divergence from it on.
    """
    divergence = (tokens.logprobs - needed(tokens.reference)).detach()
    return tokens.advantages - coefficient * to_go(divergence, tokens.sequence)
