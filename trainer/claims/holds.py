"""Why the trainer claims no batch although one is ready (a hold), and why engines do not get its weights (a gate).

The trainer by itself waits for groups, and for those that older versions sampled, and publishes what it trained.
Features hold it for other reasons: they derive from `Hold` or `PublishingGate`, and are asked in order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from trainer.model.agent import PolicyAgent
from trainer.settings import TrainerSettings
from turnwise.store.database import Connection
from turnwise.store.groups import Change
from turnwise.store.serving import ServingState
from turnwise.types import Json

if TYPE_CHECKING:
    from trainer.claims.ledger import Ledger, RunProgress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """The request to go on from another version's weights."""

    version: int
    reason: str


class Hold:
    """A reason to wait of one policy's training; its defaults have none."""

    needs_person: ClassVar[bool] = False
    """Whether the wait lasts until a person acts."""
    needs_batch: ClassVar[bool] = False
    """Whether it is asked only once there is a batch that it could stop."""

    def __init__(self, ledger: Ledger) -> None: ...

    def changes(self, conn: Connection, state: ServingState) -> list[Change]:  # noqa: ARG002  for subclasses
        """Return what must change in the store before groups are counted."""
        return []

    def watch(self) -> None:
        """Look at the store beside the reads of a poll, now and then, before a batch is claimed; may write to it."""

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | Rewind | None:  # noqa: ARG002
        """Return why no batch may be claimed now, None where one may, or the version to go back to."""
        return None


class PublishingGate:
    """A look at updated weights: a version that it refuses is kept on disk and stored as failed.

    Every process calls it in step.
    """

    def __init__(self, ledger: Ledger, learner: PolicyAgent) -> None: ...

    @classmethod
    def is_on(cls, settings: TrainerSettings) -> bool:  # noqa: ARG003  for subclasses
        return True

    def why_unpublished(self, policy_version: int) -> tuple[Json, str | None]:  # noqa: ARG002
        """Return gauges, and why weights that come from this version must not be published; None where they may."""
        return {}, None
