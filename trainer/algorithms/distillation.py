"""On-policy distillation: a teacher's logprob of each sampled token, as that token's advantage.

The student samples, the teacher rates: A_t = log π_teacher − log μ, which is minus the reverse KL of the token, taken
from the student's own sample. Agarwal et al. 2024 (GKD, arXiv:2306.13649) train on the student's samples; Gu et al.
2024 (MiniLLM, arXiv:2306.08543) minimise the reverse KL by policy gradient; Lu and Thinking Machines Lab 2025
("On-Policy Distillation") take it token by token, without a discount. Legend: M trained tokens of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from trainer.algorithms.algorithm import Scorer
from trainer.algorithms.grpo import GRPO
from trainer.algorithms.teachers import Teacher, Teachers, TeacherScores
from trainer.batch.advantages import PastValues
from trainer.batch.batch import Batch
from trainer.batch.selection import Selection
from turnwise.credit import Floats
from turnwise.errors import BatchRefused
from turnwise.settings import FromJson
from turnwise.types import Json

MAX_LOG_GAP = 20.0
"""Bound of a token's advantage in nats, so that a token that a teacher rules out does not outweigh all others."""


class Distillation(GRPO):
    """PPO's clip on the advantages that teachers give, alone or beside those of rewards."""

    name = "distillation"
    credits_tokens = True

    class Settings(GRPO.Settings):
        teachers: Annotated[tuple[Teacher, ...], FromJson] = Field(min_length=1)
        """Tables with `url`, `model`, and optionally `key`, `tasks` (a pattern of task ids) and `weight`."""
        coef: float = Field(default=1.0, gt=0)
        """Weight of the teachers' advantages."""
        with_rewards: bool = False
        """Add them to the advantages of rewards, which are GRPO's."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.compares_singles = settings.with_rewards

    @functools.cached_property
    def _teachers(self) -> Teachers:
        return Teachers(self.settings.teachers)

    def assign(self, offer: Selection, past: PastValues) -> list[Floats]:
        if self.settings.with_rewards:
            return super().assign(offer, past)
        return [np.zeros(len(experience.turn_ids)) for experience in offer.offered]

    def credit(self, batch: Batch, members: Sequence[int], scorer: Scorer) -> tuple[Batch, Json]:
        """Add what the teachers say.

        Raises:
            BatchRefused: All advantages are those of teachers, and they scored nothing.
        """
        found = scorer.world.from_first(lambda: self._teachers.score(batch, members))
        if not self.settings.with_rewards and not found.is_scored.any():
            raise BatchRefused(f"no teacher scored a chain ({found.unscored}); the log names what was wrong")
        return with_teachers(batch, found, self.settings.coef)

    def close(self) -> None:
        if "_teachers" in vars(self):
            self._teachers.close()


def with_teachers(batch: Batch, scores: TeacherScores, coefficient: float) -> tuple[Batch, Json]:
    """Return the batch with coefficient · (log π_teacher − log μ) added to scored tokens' advantages, and gauges."""
    gap = np.clip(scores.logprobs - batch.table.behaviour, -MAX_LOG_GAP, MAX_LOG_GAP)
    added = np.where(scores.is_scored, coefficient * gap, 0.0)
    table = dataclasses.replace(batch.table, advantages=(batch.table.advantages + added).astype(np.float32))
    scored = gap[scores.is_scored]
    gauges = {
        "teacher_tokens": int(scores.is_scored.sum()),
        "teacher_kl": -float(scored.mean()) if len(scored) else None,
        "num_teacher_unscored": sum(scores.unscored.values()),
        **{f"num_teacher_{reason}": count for reason, count in sorted(scores.unscored.items())},
    }
    return dataclasses.replace(batch, table=table), gauges
