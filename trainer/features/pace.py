"""How far training runs ahead of slow sessions: it waits for what old versions still sample.

Slow sessions are often the hard tasks. Dropping them because of their age would train on the quick ones alone. So the
trainer waits instead: it makes no update that would take it more than `max_versions_in_flight` versions ahead of the
oldest version that an open group was sampled by, or of a pinned version, which samples everything.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field

from trainer.claims.holds import Hold
from trainer.claims.ledger import RunProgress
from trainer.settings import TrainerSettings
from turnwise.features import pace
from turnwise.store import rows
from turnwise.store.database import Connection, clock
from turnwise.store.serving import ServingState

IN_FLIGHT_SECONDS = 120.0


class PaceSettings(TrainerSettings):
    """How far ahead of what still samples a version may be."""

    max_versions_in_flight: int | None = Field(default=4, ge=1)
    """The trainer waits while its next version would be more than this many versions ahead of the oldest one that an
    open group was sampled by. Slow sessions are then trained, not dropped, and the trainer waits for them. None never
    waits."""


class Pace(Hold[PaceSettings]):
    """Waits for the sessions of older versions."""

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | None:  # noqa: ARG002  of `Hold`
        if not self._ledger.is_paced or most_ahead(self._settings) is None:
            return None
        since = rows.from_micros(clock(conn)) - timedelta(seconds=IN_FLIGHT_SECONDS)
        oldest = pace.oldest_version_in_flight(conn, since, self._ledger.policy_id)
        return why_too_far_ahead(oldest, at, self._settings)


def why_too_far_ahead(oldest: int | None, at: RunProgress, settings: PaceSettings) -> str | None:
    """Return why no batch may be claimed while open groups were sampled by this version; None where one may."""
    bound = most_ahead(settings)
    if bound is None or oldest is None or at.staleness_of(oldest) < bound:
        return None
    return (
        f"open groups were sampled by version {oldest} and the trainer is at version {at.recent_versions[-1]}: "
        f"training waits for them (max_versions_in_flight={settings.max_versions_in_flight})"
    )


def most_ahead(settings: PaceSettings) -> int | None:
    """Return how many versions ahead of what still samples a version may be; None for any number."""
    if settings.max_versions_in_flight is None:
        return None
    if settings.max_staleness is None:
        return settings.max_versions_in_flight
    return min(settings.max_versions_in_flight, settings.max_staleness + 1)
