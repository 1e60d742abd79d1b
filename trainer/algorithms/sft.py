"""SFT: behaviour cloning of good sessions, sampled or imported."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trainer.algorithms.algorithm import Weighed
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Selection


class SFT(Weighed):
    """Imitation of the sessions with enough reward."""

    name = "sft"
    needs_behaviour = False

    class Settings(Weighed.Settings):
        min_reward: float = 1.0
        """Train sessions with at least this reward."""

    settings: Settings

    def choose(self, offer: Selection) -> Selection:
        good = [experience for experience in offer.fit if experience.reward >= self.settings.min_reward]
        kept = {experience.group_key for experience in good}
        for key in offer.keys:
            if key not in kept:
                offer.refuse(key, "reward_too_low")
        return offer.choose(good, [np.ones(len(experience.turn_ids)) for experience in good])

    def loss(self, tokens: TrainedTokens) -> Tensor:
        return -tokens.logprobs
