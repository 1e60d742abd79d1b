"""SFT: behaviour cloning of good sessions, sampled or imported."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trainer.algorithms.algorithm import Weighed
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Offer, Selection


class SFT(Weighed):
    """Imitation of the sessions with enough reward."""

    name = "sft"
    needs_behaviour = False

    class Settings(Weighed.Settings):
        min_reward: float = 1.0
        """Train sessions with at least this reward."""

    settings: Settings

    def choose(self, offer: Offer) -> Selection:
        good = [experience for experience in offer.fit if experience.reward >= self.settings.min_reward]
        kept = {experience.group_key for experience in good}
        low = {group: "reward_too_low" for group in offer.keys if group not in kept}
        return Selection(
            experiences=good,
            advantages=[np.ones(len(experience.turn_ids)) for experience in good],
            refused=low | offer.refused,
        )

    def loss(self, tokens: TrainedTokens) -> Tensor:
        return -tokens.logprobs
