"""Versions that people or engines gave up: the training waits for a person, or goes back to the weights before them.

A version that a person pinned samples everything, so a training that is far ahead of it waits, or goes on from it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Literal

from trainer.claims.holds import Detour, Hold
from trainer.claims.ledger import RunProgress
from trainer.features.pace import PaceSettings, most_ahead
from trainer.settings import TrainerSettings
from trainer.train import Training
from trainer.versions.state import State
from turnwise.errors import BadCheckpoint
from turnwise.features import rewinds
from turnwise.store.database import Connection
from turnwise.store.groups import GroupChange
from turnwise.store.serving import ServingState

log = logging.getLogger(__name__)

MOST_REFUSED = 3
"""Versions in a row that engines refuse before the training waits for a person."""


class RewindSettings(PaceSettings):
    """What happens to the weights of a version that failed, or is far behind."""

    when_failed: Literal["go_back", "go_on"] = "go_back"
    """When a version that the weights came from failed (refused by the publishing gate, rolled back, or not loaded):
    `go_back` to the weights before it, or `go_on` from the weights as they are."""
    when_pinned: Literal["wait", "train_pinned"] = "wait"
    """While a pinned version is too far behind: `wait` until it is released, or `train_pinned`: go back to the pinned
    version's weights and train from there. Neither drops groups."""


class Refusals(Hold[TrainerSettings]):
    """Waits for a person once engines refused several versions in a row."""

    needs_person = True

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | None:  # noqa: ARG002
        refused = rewinds.refused_in_a_row(conn, MOST_REFUSED, self._ledger.policy_id)
        if not refused:
            return None
        return (
            f"engines refused the last {len(refused)} versions, so training waits: {refused[0].error}. Mend "
            f"the cause, then load one again: turnwise policies activate {refused[0].version}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewind(Detour):
    """The request to go on from another version's weights; the counts of the run go on."""

    version: int
    reason: str

    def taken(self, training: Training, state: State) -> State:
        """Return the state of the version; without a state of that very version, of the newest one before it."""
        training.commits.finish_writing()  # the state to go back to may be among what is written now
        states, world, progress = training.states, training.learner.world, state.progress
        known = [*(version for version in progress.recent_versions if version < self.version), self.version]
        version = world.from_first(lambda: states.newest_with_state(known, self.version))
        try:
            older = states.of_version(version, training.settings.seed)
        except BadCheckpoint as error:
            log.error("%s, and version %d cannot be trained from: %s", self.reason, version, error)  # noqa: TRY400
            return state.with_progress(rewound_to=self.version)
        log.warning("%s: going back to version %d from version %d", self.reason, version, progress.policy_version)
        recent = older.progress.recent_versions
        older = dataclasses.replace(older, progress=progress, kept=state.kept, singles=state.singles)
        training.commits.go_back(version)
        return older.with_progress(policy_version=version, recent_versions=recent, rewound_to=self.version)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What people chose in place of versions, and which of them failed."""

    pinned: int | None = None
    failed: frozenset[int] = frozenset()
    undone: range = range(0)
    """The versions that a person undid by a choice of the version before them, without a pin."""


class Rewinds(Hold[RewindSettings]):
    """Goes back to the weights before versions that failed or were undone, and heeds a pin."""

    def changes(self, conn: Connection, state: ServingState) -> list[GroupChange]:
        of, held = self._ledger.policy_id, self._ledger.held_groups
        undone = rewinds.undone(state)
        return [rewinds.drop_sampled_by(conn, undone, of, held=held)] if undone else []

    def why_failed(self, state: ServingState, came_from: Sequence[int]) -> str | None:
        undone = rewinds.undone(state)
        return rewinds.UNDONE if any(version in undone for version in came_from) else None

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | Rewind | None:
        failed = rewinds.failed_versions(conn, at.recent_versions)
        pinned = state.pinned_version if self._ledger.is_paced else None
        given_up = GivenUp(pinned=pinned, failed=failed, undone=rewinds.undone(state))
        return why_held(given_up, at, self._settings)


def why_held(given_up: GivenUp, at: RunProgress, settings: RewindSettings) -> str | Rewind | None:
    """Return why training waits for a choice of a person, None where it does not, or the version to go back to."""
    if any(version in given_up.undone for version in at.recent_versions):
        chosen = given_up.undone.start - 1
        undid = f"version {chosen} was activated in place of version {given_up.undone.stop - 1}"
        if at.rewound_to != chosen:
            return Rewind(version=chosen, reason=undid)
        return f"{undid}, and it cannot be trained from: training waits until another version is activated"
    failed = min(given_up.failed, default=0)
    good = max((each for each in at.recent_versions if each < failed), default=None)
    if good is not None and good != at.rewound_to and settings.when_failed == "go_back":
        return Rewind(version=good, reason=f"version {failed} failed")
    bound, pinned = most_ahead(settings), given_up.pinned
    if bound is None or pinned is None or at.staleness_of(pinned) < bound:
        return None
    if settings.when_pinned == "train_pinned" and at.rewound_to != pinned:
        return Rewind(version=pinned, reason=f"version {pinned} is pinned")
    return (
        f"version {pinned} is pinned and the trainer is at version {at.recent_versions[-1]}: training waits until "
        "the pin is released or a newer version is activated (setting when_pinned)"
    )
