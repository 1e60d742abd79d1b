"""The replay buffer of off-policy training: which old groups are drawn again, by age or by spread of rewards.

The buffer holds no tokens. It is an index of groups: when each arrived, how often it was used, and the spread of its
rewards. Each sample reads the ledger again, so late rewards count and a checkpoint stays small. Ratios are taken to
the captured behaviour logprobs, which is what corrects for old rollouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trainer.batch.chain import Chain
from trainer.claims.claims import Claims
from trainer.claims.holds import Detour
from trainer.claims.ledger import NOTHING, ClaimedBatch, Kept, Ledger, RunProgress
from trainer.settings import TrainerSettings
from turnwise.settings import Settings
from turnwise.store.database import Database
from turnwise.types import GroupKey, Json, name_digest

RECENCY_HALF_LIFE = 0.25
"""Share of the buffer after which a group is half as likely to be drawn."""


class ReplaySettings(Settings):
    """The size of the buffer, and what is drawn from it."""

    workflow: Literal["on_policy", "off_policy"] = "on_policy"
    buffer_groups: int = Field(default=512, ge=1)
    """Off policy: groups that the replay buffer holds; the oldest ones leave first."""
    buffer_min_groups: int = Field(default=32, ge=1)
    """Off policy: groups that the buffer must hold before the first update."""
    buffer_sampling: Literal["uniform", "recency", "priority"] = "uniform"


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
    """The rules of the buffer; its contents, oldest group first, are in the state of the run alone."""

    def __init__(self, ledger: Ledger, settings: TrainerSettings) -> None:
        assert isinstance(settings, ReplaySettings)
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


class Sample(ClaimedBatch):
    """Groups of the buffer, which are trained at the claim of others; one that is not trained stays in the buffer."""

    may_grow: ClassVar[bool] = False

    @property
    def keys(self) -> set[GroupKey]:
        return {experience.group_key for experience in self.experiences}

    @property
    def num_groups(self) -> int:
        return len(self.keys)

    def dropped(self, refused: Mapping[GroupKey, str]) -> dict[GroupKey, str]:  # noqa: ARG002
        return {}


class ReplayClaims(Claims):
    """Puts claimed groups into the buffer, and returns samples of it.

    The claim is acked with the update, so each group enters the buffer exactly once. A sampled group that left the
    ledger's claims long ago is only read again. Old turns are trained anyway, so nothing waits for older versions.
    """

    is_paced: ClassVar[bool] = False
    may_imitate: ClassVar[bool] = False

    @classmethod
    def is_on(cls, settings: TrainerSettings) -> bool:
        assert isinstance(settings, ReplaySettings)
        return settings.workflow == "off_policy"

    def __init__(self, db: Database, settings: TrainerSettings, **of_claims: Any) -> None:
        """Claim as `Claims` does."""
        super().__init__(db, settings, **of_claims)
        self.buffer = ReplayBuffer(self, settings)

    def next(self, at: RunProgress, seconds: float | None = None, kept: Kept = NOTHING) -> ClaimedBatch | Detour | None:
        claimed = super().next(at, seconds)
        if claimed is None or isinstance(claimed, Detour):
            return claimed
        buffer = self.buffer.add(read_buffer(kept), claimed)
        if not self.buffer.can_sample(buffer):
            return dataclasses.replace(claimed, kept=_stored(buffer), untrained={"num_buffered_groups": len(buffer)})
        pks, buffer = self.buffer.sample(buffer, self.settings.groups_per_batch, at.rng())
        fields = {field.name: getattr(claimed, field.name) for field in dataclasses.fields(claimed)}
        return Sample(**fields | {"experiences": self.buffer.read(buffer, pks), "kept": _stored(buffer)})


def read_buffer(kept: Kept) -> Buffer:
    return tuple(Entry(**entry) for entry in kept.get("buffer", ()))


def _stored(buffer: Buffer) -> dict[str, list[Json]]:
    return {"buffer": [dataclasses.asdict(entry) for entry in buffer]}
