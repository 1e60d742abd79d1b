"""Advantages token by token, which need a model: those of GAE, from the critic."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.learning.batch import Batch
from trainer.learning.values import with_values
from trainer.policy.agent import PolicyAgent
from turnwise.types import Json


class TokenCredit:
    """Gives a batch's tokens the advantages that no reward alone can give."""

    def __init__(self, agent: PolicyAgent) -> None:
        self._agent = agent

    @property
    def is_needed(self) -> bool:
        """Whether the settings ask for such advantages."""
        return self._agent.critic is not None

    def assign(self, batch: Batch, members: Sequence[int]) -> tuple[Batch, Json]:
        """Return the batch with the advantages of the members' tokens, and gauges.

        Raises:
            OutOfMemory: A single chain does not fit into memory.
        """
        return with_values(batch, self._agent.values_of(batch, members), self._agent.rule)
