"""CHORD: imported sessions beside sampled ones, with the loss (1 − μ) L_RL + μ L_imported.

Zhang et al. 2025, "On-Policy RL Meets Off-Policy Experts" (arXiv:2508.11408). Each part is a mean over its own tokens,
and their weights contain μ. So sampled and imported chains share packed rows, and the loss of a row is a sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Algorithm, Imitation
from trainer.algorithms.dpo import DPO
from trainer.algorithms.grpo import GRPO
from trainer.algorithms.sft import SFT
from trainer.batch.batch import Batch, Reals
from trainer.batch.ratios import TrainedTokens

IMPORTED_GROUPS = 8
"""Imported groups of a batch, drawn again for each batch. Without groups in the import, a session is one."""
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
    imitation: Imitation

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        own: Algorithm = DPO(DPO.Settings())
        if settings.imitation != "dpo":
            own = (PhiSFT if settings.imitation == "phi" else SFT)(SFT.Settings())
        self.needs_reference = self.needs_reference or own.needs_reference
        self.imitation = Imitation(own, IMPORTED_GROUPS, functools.partial(mu_of, settings=settings))

    def weights(self, batch: Batch, members: Sequence[int]) -> Reals:
        imported = [member for member in members if batch.is_imported(member)]
        if not imported:
            return super().weights(batch, members)
        sampled = [member for member in members if not batch.is_imported(member)]
        weights: Reals = (1 - batch.mu) * super().weights(batch, sampled)
        return weights + batch.mu * self.imitation.algorithm.weights(batch, imported)

    def parts(self, tokens: TrainedTokens) -> Sequence[tuple[TrainedTokens, Algorithm]]:
        """Return the sampled tokens, and the imported ones where the batch has any."""
        if tokens.is_imported is None:
            return [(tokens, self)]
        imported = tokens.subset(tokens.is_imported)
        return [(tokens.subset(~tokens.is_imported), self), (imported, self.imitation.algorithm)]


class PhiSFT(SFT):
    """CHORD-φ: imitation with each token weighed by p (1 − p)."""

    name = ""

    def loss(self, tokens: TrainedTokens) -> Tensor:
        return phi(tokens.logprobs) * -tokens.logprobs


def mu_of(num_batches: int, settings: Chord.Settings) -> float:
    """Return μ after a number of batches: half a cosine from the peak down to the end (CHORD-μ)."""
    if not settings.decay_batches:
        return settings.mu
    decayed = min(num_batches / settings.decay_batches, 1.0)
    return MU_END + (settings.mu - MU_END) * (1 + math.cos(math.pi * decayed)) / 2


def phi(logprobs: Tensor) -> Tensor:
    probability = logprobs.detach().exp()
    return probability * (1 - probability)
