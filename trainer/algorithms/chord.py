"""CHORD: imported sessions beside sampled ones, with the loss (1 − μ) L_RL + μ L_imported.

Zhang et al. 2025, "On-Policy RL Meets Off-Policy Experts" (arXiv:2508.11408). Each part is a mean over its own tokens,
and their weights contain μ. So sampled and imported chains share packed rows, and the loss of a row is a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm
from trainer.algorithms.dpo import DPO
from trainer.algorithms.grpo import GRPO
from trainer.algorithms.sft import SFT
from trainer.batch.batch import Batch, Reals, Row
from trainer.batch.ratios import BY_CHAIN, TrainedTokens

MU_END = 0.05
"""μ after `decay_batches`, as in the paper."""


class Chord(GRPO):
    """GRPO on sampled sessions, imitation of imported ones."""

    name = "chord"

    class Settings(GRPO.Settings):
        imitation: Literal["sft", "phi", "dpo"] = "sft"
        """Loss of imported sessions: `sft` imitates those with a reward of at least 1; `phi` also weighs each token by
        φ = p (1 − p), p its probability: certain and unlikely tokens count less; `dpo` trains pairs of a better and a
        worse one."""
        mu: float = Field(default=0.1, ge=0, le=1)
        """CHORD's μ at its peak: the weight of the imported sessions' loss; that of the policy loss is 1 − μ."""
        decay_batches: int = Field(default=0, ge=0)
        """Batches over which μ falls to 0.05, as half a cosine; 0 leaves it at `mu`."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.imitation: Algorithm = DPO(DPO.Settings())
        """Trains the imported sessions."""
        if settings.imitation != "dpo":
            self.imitation = (PhiSFT if settings.imitation == "phi" else SFT)(SFT.Settings())
        self.needs_reference = self.needs_reference or self.imitation.needs_reference

    def weights(self, batch: Batch, members: Sequence[int]) -> Reals:
        imported = [member for member in members if member >= batch.num_sampled]
        if batch.mixed is None or not imported:
            return super().weights(batch, members)
        sampled = [member for member in members if member < batch.num_sampled]
        mu = batch.mixed.share
        weights: Reals = (1 - mu) * super().weights(batch, sampled)
        return weights + mu * self.imitation.weights(batch, imported)

    def parts(self, tokens: TrainedTokens, batch: Batch, row: Row) -> Sequence[tuple[TrainedTokens, Algorithm]]:
        """Return the sampled tokens, and the imported ones where the batch has any."""
        if batch.mixed is None:
            return super().parts(tokens, batch, row)
        is_sampled = torch.from_numpy(batch.table.experience[row.token] < batch.num_sampled).to(tokens.logprobs.device)
        return [(_subset(tokens, is_sampled), self), (_subset(tokens, ~is_sampled), self.imitation)]

    def share(self, num_batches: int) -> float:
        """Return μ after a number of batches: half a cosine from the peak down to the end (CHORD-μ)."""
        if not self.settings.decay_batches:
            return self.settings.mu
        decayed = min(num_batches / self.settings.decay_batches, 1.0)
        return MU_END + (self.settings.mu - MU_END) * (1 + math.cos(math.pi * decayed)) / 2


class PhiSFT(SFT):
    """CHORD-φ: imitation with each token weighed by p (1 − p)."""

    name = ""

    def loss(self, tokens: TrainedTokens) -> Tensor:
        return phi(tokens.logprobs) * -tokens.logprobs


def phi(logprobs: Tensor) -> Tensor:
    probability = logprobs.detach().exp()
    return probability * (1 - probability)


def _subset(tokens: TrainedTokens, is_in: Tensor) -> TrainedTokens:
    """Return the tokens where `is_in` [M] is True; chains keep their indices."""
    columns = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    by_token = {name: column for name, column in columns.items() if column is not None and name not in BY_CHAIN}
    return dataclasses.replace(tokens, **{name: column[is_in] for name, column in by_token.items()})
