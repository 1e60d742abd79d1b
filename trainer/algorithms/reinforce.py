"""What differs from GRPO in its baseline alone: RLOO, Dr. GRPO, GDPO and REINFORCE++; and REINFORCE without ratio."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated

import numpy as np
from pydantic import Field
from torch import Tensor

from trainer.algorithms.grpo import GRPO, PolicyGradient
from trainer.batch.advantages import PastValues, SingleValue, bucket_for, by_bucket, compared, value_of, whiten
from trainer.batch.batch import Aggregation
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Selection
from turnwise.credit import Floats
from turnwise.settings import FromJson
from turnwise.types import SessionKey


class Reinforce(PolicyGradient):
    """The plain policy gradient, for sessions of the version that is trained. Williams 1992, sections 4 and 5."""

    name = "reinforce"
    has_ratio = False

    def policy_loss(self, tokens: TrainedTokens) -> Tensor:
        return -tokens.advantages * tokens.logprobs


class RLOO(GRPO):
    """REINFORCE leave one out: x_i − mean of the others. Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740)."""

    name = "rloo"
    scales_singles = False

    def centre(self, values: Floats) -> Floats:
        size = len(values)
        centred: Floats = values - values.mean()
        return centred * (size / (size - 1))


class DrGRPO(GRPO):
    """Dr. GRPO: x_i − mean; a std favours easy and hard tasks. Liu et al. 2025 (arXiv:2503.20783), section 3.1."""

    name = "dr_grpo"
    scales_singles = False

    class Settings(GRPO.Settings):
        aggregation: Aggregation = "session_sum"
        """How tokens are weighed: `token_mean`, `session_mean` or `session_sum`."""
        session_tokens: int = Field(default=1024, ge=1)
        """The constant that `session_sum` divides by."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.session_tokens = settings.session_tokens

    def centre(self, values: Floats) -> Floats:
        return dr_grpo(values)


class GDPO(GRPO):
    """GDPO: Σ_n w_n GRPO(reward n), normalised over the batch. Liu et al. 2026 (arXiv:2601.05242).

    Each named reward is compared apart: summed first, those of small spread would vanish beside those of large spread.
    Sessions only; step rewards count towards their session's. A session without one of the names is not compared by it.
    """

    name = "gdpo"

    class Settings(GRPO.Settings):
        reward_weights: Annotated[dict[str, float], FromJson] = Field(default_factory=dict)
        """Weight of each reward name; names that are not listed weigh 1."""

    settings: Settings

    def assign(self, offer: Selection, past: PastValues) -> list[Floats]:
        sessions: dict[tuple[SessionKey, Hashable], int] = {}
        members = [(one.session_key, bucket_for(one, None, offer.kind_pattern)) for one in offer.offered]
        for member in members:
            sessions.setdefault(member, len(sessions))
        first = dict(reversed(list(zip(members, offer.offered, strict=True))))
        rewards = [first[member].named_rewards for member in sessions]
        total = np.zeros(len(sessions))
        for name in sorted({name for one in rewards for name in one}):
            having = [(n, member) for member, n in sessions.items() if name in rewards[n]]
            values = np.array([rewards[n][name] for n, _ in having], np.float64)
            buckets = [bucket_for(first[member], f"reward {name}", offer.kind_pattern) for _, member in having]
            weight = self.settings.reward_weights.get(name, 1.0)
            total[[n for n, _ in having]] += weight * by_bucket(values, buckets, self.centre, past, is_scaled=True)
        advantages = whiten(total)
        return [
            np.full(len(one.turn_ids), advantages[sessions[member]])
            for one, member in zip(offer.offered, members, strict=True)
        ]

    def single_values(self, offer: Selection) -> list[SingleValue]:
        rows: dict[SingleValue, None] = {}
        for experience in (one for one in offer.offered if one.is_single):
            named = experience.named_rewards.items()
            rows |= {value_of(experience, f"reward {name}", value, offer.kind_pattern): None for name, value in named}
        return list(rows)


def dr_grpo(values: Floats) -> Floats:
    centred: Floats = values - values.mean()
    return centred


class ReinforcePlusPlus(GRPO):
    """REINFORCE++: rewards are normalised over the batch, in no groups. Hu et al. 2025 (arXiv:2501.03262)."""

    name = "reinforce_plus_plus"
    compares_singles = False

    def assign(self, offer: Selection, past: PastValues) -> list[Floats]:  # noqa: ARG002  it has no single sessions
        those = compared(offer.offered)
        return those.of_turns(whiten(those.values))


class ReinforcePlusPlusBaseline(GRPO):
    """REINFORCE++ with a baseline: x_i − mean of its group, then normalised over the batch. arXiv:2501.03262."""

    name = "reinforce_plus_plus_baseline"
    scales_singles = False

    def assign(self, offer: Selection, past: PastValues) -> list[Floats]:
        those = compared(offer.offered)
        centred = np.zeros(len(those.values))
        for place, advantages in zip(those.places, super().assign(offer, past), strict=True):
            centred[place] = advantages
        return those.of_turns(whiten(centred))

    def centre(self, values: Floats) -> Floats:
        return dr_grpo(values)
