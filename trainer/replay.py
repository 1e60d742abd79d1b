"""The replay buffer of off-policy training: which old groups are drawn again, by age or by spread of rewards.

The buffer holds no tokens. It is an index of groups: when each arrived, how often it was used, and the spread of its
rewards. Each sample reads the ledger again, so late rewards count and a checkpoint stays small. Ratios are taken to
the captured behaviour logprobs, which is what corrects for old rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.batch.chain import Chain
from trainer.claims.ledger import ClaimedBatch, Ledger
from trainer.settings import TrainerSettings
from turnwise.types import name_digest

RECENCY_HALF_LIFE = 0.25
"""Share of the buffer after which a group is half as likely to be drawn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One group in the buffer."""

    group_pk: int
    group: str
    """Digest of the group's tenant and id: a checkpoint names nobody."""
    arrived: int
    """Count of arrivals: the order in which groups leave."""
    num_uses: int = 0
    priority: float = 1.0
    """Spread of the group's rewards: without one, a group has no advantage."""


Buffer = tuple[Entry, ...]


class ReplayBuffer:
    """The rules of the buffer; its contents, oldest group first, are in `State.buffer` alone."""

    def __init__(self, ledger: Ledger, settings: TrainerSettings) -> None:
        self._ledger = ledger
        self._settings = settings

    def add(self, buffer: Buffer, claimed: ClaimedBatch) -> Buffer:
        """Return the buffer with a claim's groups in it; the oldest leave when it is full."""
        entries = list(buffer)
        arrived = entries[-1].arrived + 1 if entries else 0
        for number, group in enumerate(claimed.claim.groups):
            rewards = {e.session_key: e.reward for e in claimed.experiences if e.group_key == group.key}
            entries.append(
                Entry(
                    group_pk=group.group_pk,
                    group=name_digest(group.key),
                    arrived=arrived + number,
                    priority=float(np.std(list(rewards.values()))) if rewards else 0.0,
                )
            )
        return tuple(entries[-self._settings.buffer_groups :])

    def sample(self, buffer: Buffer, num_groups: int, rng: np.random.Generator) -> tuple[list[int], Buffer]:
        """Draw groups without replacement; return their keys in the store, and the buffer with its use counts."""
        drawn = rng.choice(len(buffer), size=min(num_groups, len(buffer)), replace=False, p=self._chances(buffer))
        used = list(buffer)
        for index in drawn:
            used[index] = dataclasses.replace(used[index], num_uses=used[index].num_uses + 1)
        return [used[index].group_pk for index in drawn], tuple(used)

    def can_sample(self, buffer: Buffer) -> bool:
        return len(buffer) >= self._settings.buffer_min_groups

    def read(self, buffer: Buffer, group_pks: Sequence[int]) -> list[Chain]:
        """Return the experiences of groups of the buffer with the rewards that they have by now.

        A group that has left the store has none, even if its number in the store belongs to another group by now.
        """
        held = {entry.group for entry in buffer if entry.group_pk in group_pks}
        return [each for each in self._ledger.experiences_of(group_pks) if name_digest(each.group_key) in held]

    def _chances(self, buffer: Buffer) -> npt.NDArray[np.float64]:
        if self._settings.buffer_sampling == "recency":
            age = np.arange(len(buffer))[::-1] / len(buffer)
            weights = 0.5 ** (age / RECENCY_HALF_LIFE)
        elif self._settings.buffer_sampling == "priority":
            weights = np.array([entry.priority for entry in buffer]) + 1e-3
        else:
            weights = np.ones(len(buffer))
        chances: npt.NDArray[np.float64] = weights / weights.sum()
        return chances
