"""GRPO and its relatives: PPO's clip on the advantages of a group, which differ in how rewards are compared."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from pydantic import Field, field_validator
from torch import Tensor

from trainer.algorithms.policy_gradient import PolicyGradient, cut_off, ppo_clip, ratio
from trainer.learning.advantages import (
    PastValues,
    Row,
    bucket_for,
    by_bucket,
    compared,
    named_rows,
    rewards_by_name,
    whiten,
)
from trainer.learning.batch import Aggregation
from trainer.learning.ratios import TrainedTokens
from trainer.learning.selection import Offer
from turnwise.comparison import Floats
from turnwise.settings import parsed_json
from turnwise.types import SessionKey

DUAL_CLIP = 3.0
"""Bound of the ratio where the advantage is negative, as in Ye et al. 2020 (arXiv:1912.09729)."""


class GRPO(PolicyGradient):
    """Group Relative Policy Optimization: (x_i − mean) / (std + ε) in each group. Shao et al. 2024 (arXiv:2402.03300).

    The ratio is clipped as in PPO, with DAPO's clip-higher and the dual clip; see `ppo_clip`.
    """

    name = "grpo"

    class Settings(PolicyGradient.Settings):
        """The bounds of the ratio."""

        clip_low: float = Field(default=0.2, ge=0)
        """Lower bound of the ratio: 1 − clip_low."""
        clip_high: float = Field(default=0.28, ge=0)
        """Upper bound of the ratio: 1 + clip_high; above `clip_low` it is DAPO's clip-higher."""

    settings: Settings

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        """Clip the ratio."""
        settings = self.settings
        return ppo_clip(ratio(tokens), tokens.advantages, settings.clip_low, settings.clip_high, DUAL_CLIP)

    def gauges(self, tokens: TrainedTokens) -> dict[str, Tensor]:
        """Return where the clip cuts the gradient off."""
        settings = self.settings
        cut = cut_off(ratio(tokens), tokens.advantages, settings.clip_low, settings.clip_high)
        return {"clip_fraction": cut}


class RLOO(GRPO):
    """REINFORCE leave one out: x_i − mean of the others. Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740)."""

    name = "rloo"
    scales_singles = False

    def centre(self, values: Floats) -> Floats:
        """Compare each value with the mean of the others."""
        return rloo(values)


class DrGRPO(GRPO):
    """Dr. GRPO: x_i − mean; a std favours easy and hard tasks. Liu et al. 2025 (arXiv:2503.20783), section 3.1."""

    name = "dr_grpo"
    scales_singles = False

    class Settings(GRPO.Settings):
        """GRPO's, with sums over sessions."""

        aggregation: Aggregation = "session_sum"
        """How tokens are weighed: `token_mean`, `session_mean` or `session_sum`."""
        session_tokens: int = Field(default=1024, ge=1)
        """The constant that `session_sum` divides by."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.session_tokens = settings.session_tokens

    def centre(self, values: Floats) -> Floats:
        """Subtract the mean."""
        return dr_grpo(values)


class ReinforcePlusPlus(GRPO):
    """REINFORCE++: rewards are normalised over the batch, in no groups. Hu et al. 2025 (arXiv:2501.03262)."""

    name = "reinforce_plus_plus"
    compares_singles = False

    def assign(self, offer: Offer, past: PastValues) -> list[Floats]:  # noqa: ARG002  it has no single sessions
        """Normalise all values together."""
        those = compared(offer.experiences)
        return those.of_turns(whiten(those.values))


class ReinforcePlusPlusBaseline(GRPO):
    """REINFORCE++ with a baseline: x_i − mean of its group, then normalised over the batch. arXiv:2501.03262."""

    name = "reinforce_plus_plus_baseline"
    scales_singles = False

    def assign(self, offer: Offer, past: PastValues) -> list[Floats]:
        """Normalise what is left after the baseline."""
        those = compared(offer.experiences)
        centred = np.zeros(len(those.values))
        for place, advantages in zip(those.places, super().assign(offer, past), strict=True):
            centred[place] = advantages
        return those.of_turns(whiten(centred))

    def centre(self, values: Floats) -> Floats:
        """Subtract the mean."""
        return dr_grpo(values)


class GDPO(GRPO):
    """GDPO: Σ_n w_n GRPO(reward n), normalised over the batch. Liu et al. 2026 (arXiv:2601.05242).

    Each named reward is compared apart: summed first, those of small spread would vanish beside those of large spread.
    Sessions only; step rewards count towards their session's.
    """

    name = "gdpo"

    class Settings(GRPO.Settings):
        """GRPO's, with weights."""

        reward_weights: dict[str, float] = Field(default_factory=dict)
        """Weight of each reward name; names that are not listed weigh 1."""

        @field_validator("reward_weights", mode="before")
        @classmethod
        def _parse(cls, value: Any) -> Any:
            return parsed_json(value)

    settings: Settings

    def assign(self, offer: Offer, past: PastValues) -> list[Floats]:
        """Compare each named reward apart."""
        sessions: dict[tuple[SessionKey, Hashable], int] = {}
        members = [(one.session_key, bucket_for(one, None, offer.kind_pattern)) for one in offer.experiences]
        for member in members:
            sessions.setdefault(member, len(sessions))
        first = dict(reversed(list(zip(members, offer.experiences, strict=True))))
        rewards = [rewards_by_name(first[member]) for member in sessions]
        total = np.zeros(len(sessions))
        for name in sorted({name for one in rewards for name in one}):
            values = np.array([one.get(name, 0.0) for one in rewards], np.float64)
            buckets = [bucket_for(first[member], f"reward {name}", offer.kind_pattern) for member in sessions]
            weight = self.settings.reward_weights.get(name, 1.0)
            total += weight * by_bucket(values, buckets, self.centre, past, is_scaled=True)
        advantages = whiten(total)
        return [
            np.full(len(one.turn_ids), advantages[sessions[member]])
            for one, member in zip(offer.experiences, members, strict=True)
        ]

    def single_rows(self, offer: Offer) -> list[Row]:
        """Return the values of each named reward."""
        return named_rows(offer.experiences, offer.kind_pattern)


def rloo(values: Floats) -> Floats:
    """Return x_i − mean of the others; G ≥ 2."""
    size = len(values)
    centred: Floats = values - values.mean()
    return centred * (size / (size - 1))


def dr_grpo(values: Floats) -> Floats:
    """Return x_i − mean."""
    centred: Floats = values - values.mean()
    return centred
