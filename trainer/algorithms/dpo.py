"""DPO: a better and a worse session of a group, sampled or imported. Rafailov et al. 2023 (arXiv:2305.18290).

Legend: M trained tokens, S chains, P pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm, needed
from trainer.batch.advantages import UNIFORM
from trainer.batch.batch import Batch, Reals
from trainer.batch.chain import Chain
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Pair, Selection
from turnwise.settings import Settings as BaseSettings
from turnwise.types import SessionKey


class DPO(Algorithm):
    """Direct Preference Optimization."""

    name = "dpo"
    trains_pairs = True

    class Settings(BaseSettings):
        beta: float = Field(default=0.1, gt=0)
        """DPO's β."""
        reference: Literal["base", "behaviour"] = "base"
        """The reference policy: what the policy started from, the base model or an adapter, or the one that sampled."""
        pairs: Literal["best_worst", "all"] = "best_worst"
        """One pair a group, its best and its worst session, or every two sessions of different reward."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.needs_reference = settings.reference == "base"
        self.needs_behaviour = settings.reference == "behaviour"

    def choose(self, offer: Selection) -> Selection:
        """Choose pairs of sessions of a group; a session of several pairs is there once for each."""
        kept: list[Chain] = []
        pairs: list[Pair] = []
        number = 0
        for group in offer.keys:
            members = [experience for experience in offer.fit if experience.group_key == group]
            found = self._session_pairs({experience.session_key: experience.reward for experience in members})
            if not found:
                offer.refuse(group, UNIFORM)
            for best, worst in found:
                for experience in members:
                    if experience.session_key in (best, worst):
                        kept.append(experience)
                        pairs.append(Pair(number, experience.session_key == best))
                number += 1
        ones = [np.ones(len(experience.turn_ids)) for experience in kept]
        return offer.choose(kept, ones, pairs=pairs)

    def _session_pairs(self, rewards: dict[SessionKey, float]) -> list[tuple[SessionKey, SessionKey]]:
        if self.settings.pairs == "all":
            return [(a, b) for a, b in itertools.permutations(rewards, 2) if rewards[a] > rewards[b]]
        if not rewards or max(rewards.values()) == min(rewards.values()):
            return []
        return [(max(rewards, key=rewards.__getitem__), min(rewards, key=rewards.__getitem__))]

    def weights(self, batch: Batch, members: Sequence[int]) -> Reals:
        return batch.weights(members, "session_mean", 1)

    def loss(self, tokens: TrainedTokens) -> Tensor:
        """Return the loss of each token's pair: chains are summed, those of the better session apart."""
        pair_S, chosen_S = needed(tokens.pair), needed(tokens.chosen)
        reference = tokens.behaviour if self.settings.reference == "behaviour" else needed(tokens.reference)
        pair_M, chosen_M = pair_S[tokens.sequence], chosen_S[tokens.sequence]
        margin_M = tokens.logprobs - reference
        zeros = margin_M.new_zeros(int(pair_S.max()) + 1)
        chosen = zeros.index_add(0, pair_M, torch.where(chosen_M, margin_M, 0.0))
        rejected = zeros.index_add(0, pair_M, torch.where(chosen_M, 0.0, margin_M))
        return dpo(chosen, rejected, self.settings.beta)[pair_M]


def dpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return −log σ(β (chosen − rejected)), both as sums of log π − log π_ref; eq. 7.

    Both and the result [P].
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected))
