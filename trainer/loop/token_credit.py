"""Advantages token by token, which need a model: those of GAE from the critic, and those of teachers."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.learning.batch import Batch
from trainer.learning.distillation import with_teachers
from trainer.learning.values import with_values
from trainer.policy.agent import PolicyAgent
from trainer.settings import TrainerSettings
from trainer.teachers import Teachers
from turnwise.errors import BatchRefused
from turnwise.types import Json


class TokenCredit:
    """Adds the advantages that need a model to those of a batch's tokens."""

    def __init__(self, agent: PolicyAgent, rule: TrainerSettings) -> None:
        self._agent = agent
        self._rule = rule
        self._teachers = Teachers(rule) if rule.teachers else None

    @property
    def is_needed(self) -> bool:
        """Whether the settings ask for such advantages."""
        return self._agent.critic is not None or self._teachers is not None

    def assign(self, batch: Batch, members: Sequence[int]) -> tuple[Batch, Json]:
        """Return the batch with the advantages of the members' tokens, and gauges.

        Raises:
            BatchRefused: All advantages are those of teachers, and they scored nothing.
            OutOfMemory: A single chain does not fit into memory.
        """
        gauges: Json = {}
        if self._agent.critic is not None:
            batch, gauges = with_values(batch, members, self._agent.values_of(batch, members), self._rule)
        if self._teachers is None:
            return batch, gauges
        world = self._agent.world
        scores = world.share(self._teachers.score(batch, members) if world.is_first else None)
        if self._rule.estimator == "teacher" and not scores.is_scored.any():
            raise BatchRefused(f"no teacher scored a chain ({scores.unscored}); the log names what was wrong")
        batch, more = with_teachers(batch, scores, self._rule.teacher_coef)
        return batch, gauges | more

    def close(self) -> None:
        """Close the connections to teachers."""
        if self._teachers is not None:
            self._teachers.close()
