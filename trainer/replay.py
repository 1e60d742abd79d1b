"""The replay buffer of off-policy training, over the ledger.

The buffer holds no tokens. It is an index of groups: when each arrived, how often it was used, and the spread of its
rewards. Each sample reads the ledger again, so late rewards count and a checkpoint stays small. Ratios are taken to
the captured behaviour logprobs, which is what corrects for old rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from trainer.claims.ledger import ClaimedBatch, Ledger
from trainer.settings import TrainerSettings
from turnwise.chains import Experience
from turnwise.types import Json, name_digest

Buffer = tuple[Json, ...]
Sampling = Literal["uniform", "recency", "priority"]

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


class ReplayBuffer:
    """The rules of the buffer; its contents are in `State.buffer` alone."""

    def __init__(self, ledger: Ledger, *, capacity: int, min_groups: int, sampling: Sampling) -> None:
        self._ledger = ledger
        self._capacity = capacity
        self._min_groups = min_groups
        self._sampling: Sampling = sampling

    @classmethod
    def of(cls, ledger: Ledger, settings: TrainerSettings) -> Self:
        return cls(
            ledger,
            capacity=settings.buffer_groups,
            min_groups=settings.buffer_min_groups,
            sampling=settings.buffer_sampling,
        )

    def add(self, buffer: Buffer, claimed: ClaimedBatch) -> Buffer:
        """Return the buffer with a claim's groups in it; the oldest leave when it is full."""
        entries = self.entries(buffer)
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
        return _as_json(entries[-self._capacity :])

    def sample(self, buffer: Buffer, num_groups: int, rng: np.random.Generator) -> tuple[list[int], Buffer]:
        """Draw groups without replacement; return their keys in the store, and the buffer with its use counts."""
        entries = self.entries(buffer)
        drawn = rng.choice(len(entries), size=min(num_groups, len(entries)), replace=False, p=self._chances(entries))
        chosen = {int(index) for index in drawn}
        used = [
            dataclasses.replace(entry, num_uses=entry.num_uses + 1) if index in chosen else entry
            for index, entry in enumerate(entries)
        ]
        return [entries[int(index)].group_pk for index in drawn], _as_json(used)

    def can_sample(self, buffer: Buffer) -> bool:
        return len(self.entries(buffer)) >= self._min_groups

    def is_full(self, buffer: Buffer) -> bool:
        return len(self.entries(buffer)) >= self._capacity

    def read(self, buffer: Buffer, group_pks: Sequence[int]) -> list[Experience]:
        """Return the experiences of groups of the buffer with the rewards that they have by now.

        A group that has left the store has none, even if its number in the store belongs to another group by now.
        """
        held = {entry.group for entry in self.entries(buffer) if entry.group_pk in group_pks}
        return [each for each in self._ledger.experiences_of(group_pks) if name_digest(each.group_key) in held]

    @staticmethod
    def entries(buffer: Buffer) -> list[Entry]:
        return [Entry(**entry) for entry in buffer]

    def _chances(self, entries: Sequence[Entry]) -> npt.NDArray[np.float64]:
        if self._sampling == "recency":
            age = np.arange(len(entries))[::-1] / len(entries)
            weights = 0.5 ** (age / RECENCY_HALF_LIFE)
        elif self._sampling == "priority":
            weights = np.array([entry.priority for entry in entries]) + 1e-3
        else:
            weights = np.ones(len(entries))
        chances: npt.NDArray[np.float64] = weights / weights.sum()
        return chances


def _as_json(entries: Sequence[Entry]) -> Buffer:
    return tuple(dataclasses.asdict(entry) for entry in entries)
