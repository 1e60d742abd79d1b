"""Versions that people or engines gave up: the training waits for a person, or goes back to the weights before them.

A version that a person pinned samples everything, so a training that is far ahead of it waits, or goes on from it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from trainer.claims.claims import most_ahead
from trainer.claims.holds import Hold, Rewind
from trainer.claims.ledger import RunProgress
from trainer.settings import TrainerSettings
from turnwise.settings import Settings
from turnwise.store import claims, versions
from turnwise.store.database import Connection
from turnwise.store.groups import Change
from turnwise.store.serving import ServingState

MOST_REFUSED = 3
"""Versions in a row that engines refuse before the training waits for a person."""


class RewindSettings(Settings):
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
        refused = versions.refused_in_a_row(conn, MOST_REFUSED, self._ledger.policy_id)
        if not refused:
            return None
        return (
            f"engines refused the last {len(refused)} versions, so training waits: {refused[0].error}. Mend "
            f"the cause, then load one again: turnwise policies activate {refused[0].version}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What people chose in place of versions, and which of them failed."""

    pinned: int | None = None
    failed: frozenset[int] = frozenset()
    undone: range = range(0)
    """The versions that a person undid by a choice of the version before them, without a pin."""


class Rewinds(Hold[TrainerSettings]):
    """Goes back to the weights before versions that failed or were undone, and heeds a pin."""

    def changes(self, conn: Connection, state: ServingState) -> list[Change]:
        of, held = self._ledger.policy_id, self._ledger.held_groups
        return [claims.undone(conn, state.undone, of, held=held)] if state.undone else []

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | Rewind | None:
        failed = versions.failed_versions(conn, at.recent_versions)
        pinned = state.pinned_version if self._ledger.is_paced else None
        return why_held(GivenUp(pinned=pinned, failed=failed, undone=state.undone), at, self._settings)


def why_held(given_up: GivenUp, at: RunProgress, settings: TrainerSettings) -> str | Rewind | None:
    """Return why training waits for a choice of a person, None where it does not, or the version to go back to."""
    assert isinstance(settings, RewindSettings)
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
