"""REINFORCE on GRPO's advantages, without ratio or clip, and the family of its baselines: RLOO and REINFORCE++."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trainer.algorithms.grpo import GRPO, PolicyGradient, dr_grpo
from trainer.batch.advantages import PastValues, compared, whiten
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Selection
from turnwise.credit import Floats


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
