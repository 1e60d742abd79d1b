"""On-policy distillation: a teacher's logprob of each sampled token, as that token's advantage.

The student samples, the teacher rates: A_t = log π_teacher − log μ, which is minus the reverse KL of the token, taken
from the student's own sample. Agarwal et al. 2024 (GKD, arXiv:2306.13649) train on the student's samples; Gu et al.
2024 (MiniLLM, arXiv:2306.08543) minimise the reverse KL by policy gradient; Lu and Thinking Machines Lab 2025
("On-Policy Distillation") take it token by token, without a discount. Legend: M trained tokens of a batch.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from trainer.learning.batch import Batch, Reals
from turnwise.settings import Settings
from turnwise.types import Json

MAX_LOG_GAP = 20.0
"""Bound of a token's advantage in nats, so that a token that a teacher rules out does not outweigh all others."""


class Teacher(BaseModel):
    """A vLLM endpoint whose model rates the student's tokens. Its tokens must have the same ids."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str
    """Address of its API, with `/v1`."""
    model: str
    """Name under which it is served."""
    key: SecretStr | None = None
    """API key; None sends none."""
    tasks: str = "*"
    """Pattern of the task ids that it rates, as in a shell."""
    weight: float = Field(default=1.0, gt=0)
    """Weight among the teachers of the same task."""


class DistillationRule(Settings):
    """The teachers, and how they are asked."""

    teachers: tuple[Teacher, ...] = ()
    """Tables with `url`, `model`, and optionally `key`, `tasks` (a pattern of task ids) and `weight`."""
    teacher_coef: float = Field(default=1.0, gt=0)
    """Weight of the teachers' advantages, which are added to those of the estimator."""
    teacher_max_tokens: int | None = Field(default=None, ge=2)
    """Longer chains are not sent to teachers; None sends all."""
    teacher_concurrency: int = Field(default=8, ge=1)
    """Requests at once."""
    teacher_timeout_seconds: float = Field(default=60.0, gt=0)
    """Time limit of a request."""
    teacher_retry_seconds: float = Field(default=600.0, ge=0)
    """How long a chain is sent again to a teacher that is not reachable or overloaded, before it counts as unscored.
    All chains of a batch together wait no longer for a teacher that answers none of them."""

    @field_validator("teachers", mode="before")
    @classmethod
    def _parse_teachers(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """What the teachers said about a batch."""

    logprobs: Reals
    """Logprob of each trained token, the weighted mean over its teachers; 0 where none scored it. [M]"""
    is_scored: npt.NDArray[np.bool_]
    """[M]"""
    unscored: dict[str, int]
    """Requests without a usable answer, by reason, and chains without a teacher."""


def with_teachers(batch: Batch, scores: TeacherScores, coefficient: float) -> tuple[Batch, Json]:
    """Return the batch with coefficient · (log π_teacher − log μ) added to the advantages of scored tokens; gauges.

    Args:
        batch: The batch.
        scores: Of its tokens.
        coefficient: Weight of the teachers.
    """
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
