"""Policy gradients: what all share (ratio, clip, KL), and GRPO.

`PolicyGradient` chooses the groups that are trained, compares single sessions, and adds weights, entropy and KL. A
subclass gives `policy_loss`, and `advantages` where a group is not compared by GRPO's rule.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Group, Weighed, needed
from trainer.batch.advantages import (
    PastValues,
    SingleValue,
    by_bucket,
    compared,
    groups_of,
    past_values,
    single_values,
    uniform_groups,
)
from trainer.batch.ratios import (
    ImportanceRule,
    TrainedTokens,
    anchor,
    importance_gate,
    importance_weight,
    ratio_of,
    to_go,
)
from trainer.batch.selection import Selection, check_advantages, without_advantage
from turnwise.credit import Floats, normalised

DUAL_CLIP = 3.0
"""Bound of the ratio where the advantage is negative, as in Ye et al. 2020 (arXiv:1912.09729)."""


class PolicyGradient(Weighed):
    """A loss of advantages and importance ratios."""

    class Settings(Weighed.Settings, ImportanceRule):
        entropy_coef: float = 0.0
        """Weight of the entropy bonus."""
        kl_coef: float = Field(default=0.0, ge=0)
        """Weight of the KL to what the policy started from. Above 0, full training holds the base model in memory
        beside the policy; LoRA uses its own base, or the adapter that it started from."""
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

    def choose(self, offer: Selection) -> Selection:
        """Choose the groups with an advantage. Turns that are left out still count in their group's baseline."""
        rows = self.single_values(offer)
        past = past_values(offer.window, rows)
        advantages = self.assign(offer, past)
        uniform = set() if self.credits_tokens else uniform_groups(offer.offered, advantages)
        kept = [
            (experience, turns)
            for experience, turns, reason in zip(offer.offered, advantages, offer.reasons, strict=True)
            if reason is None and experience.group_key not in uniform
        ]
        for key, why in without_advantage(offer, uniform, rows, past).items():
            offer.refuse(key, why)
        return offer.choose([chain for chain, _ in kept], [turns for _, turns in kept], single_values=rows)

    def assign(self, offer: Selection, past: PastValues) -> list[Floats]:
        """Return the advantages of every experience, of each turn [K] or of each token [L]."""
        found: list[Floats] = [np.empty(0)] * len(offer.offered)
        singles = [n for n, one in enumerate(offer.offered) if self.compares_singles and one.is_single]
        for members in groups_of(offer.offered, set(singles)):
            group = Group([offer.offered[member] for member in members])
            for member, advantages in zip(members, self.advantages(group), strict=True):
                found[member] = np.asarray(advantages, np.float64)
                check_advantages(offer.offered[member], found[member])
        those = compared([offer.offered[n] for n in singles], offer.kind_pattern)
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

    def single_values(self, offer: Selection) -> list[SingleValue]:
        if not self.compares_singles:
            return []
        return single_values(offer.offered, offer.kind_pattern)

    @abc.abstractmethod
    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        """Return the loss of each token without importance weights and penalties. [M]."""

    def loss(self, tokens: TrainedTokens) -> Tensor:
        settings = self.settings
        if settings.kl_coef and settings.kl_in == "reward":
            tokens.advantages = kl_in_advantages(tokens, settings.kl_coef)
        is_carried = tokens.proximal is None and self.has_ratio  # the loss has the ratio to the policy that sampled
        weight = 1.0 if is_carried else importance_weight(tokens, settings)
        loss_M = self.policy_loss(tokens) * importance_gate(tokens, settings) * weight
        if settings.entropy_coef:
            loss_M = loss_M - settings.entropy_coef * tokens.entropy
        if settings.kl_coef and settings.kl_in == "loss":
            loss_M = loss_M + settings.kl_coef * kl(tokens.logprobs, needed(tokens.reference))
        return loss_M


class GRPO(PolicyGradient):
    """Group Relative Policy Optimization: (x_i − mean) / (std + ε) in each group. Shao et al. 2024 (arXiv:2402.03300).

    The ratio is clipped as in PPO, with DAPO's clip-higher and the dual clip; see `ppo_clip`.
    """

    name = "grpo"

    class Settings(PolicyGradient.Settings):
        clip_low: float = Field(default=0.2, ge=0)
        """Lower bound of the ratio: 1 − clip_low."""
        clip_high: float = Field(default=0.28, ge=0)
        """Upper bound of the ratio: 1 + clip_high; above `clip_low` it is DAPO's clip-higher."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        settings = self.settings
        return ppo_clip(ratio(tokens), tokens.advantages, settings.clip_low, settings.clip_high, DUAL_CLIP)

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:
        settings = self.settings
        cut = cut_off(ratio(tokens), tokens.advantages, settings.clip_low, settings.clip_high)
        return {"clip_fraction": cut}


def ratio(tokens: TrainedTokens) -> Tensor:
    """Return π / π_old of each token, π_old being that of the start of the batch where it is known. [M]."""
    return ratio_of(tokens.logprobs, anchor(tokens))


def out_of_bounds(ratio: Tensor, low: float, high: float) -> Tensor:
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
