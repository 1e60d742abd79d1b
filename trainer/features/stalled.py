"""When the trainer closes groups that miss runs, so that one session without a reward holds back no other one."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from trainer.claims.holds import Hold
from trainer.claims.ledger import Ledger
from turnwise.features import stalled
from turnwise.settings import Settings
from turnwise.store import rows
from turnwise.store.database import Connection, IdleClock, clock
from turnwise.store.groups import GroupChange
from turnwise.store.serving import ServingState


class StalledSettings(Settings):
    """When a group is closed although it misses runs."""

    stalled_seconds: float | None = 900.0
    """Close a group without activity for this long; None leaves it open."""
    unrewarded_seconds: float | None = Field(default=None, ge=0)
    """Let a session that ended this long ago without a reward count as failed: its group is trained without it, if the
    others are finished. None waits for `stalled_seconds`; set it where a grader may give no reward."""
    stalled_policy: Literal["train", "drop"] = "train"
    """Train a stalled group without its missing sessions, or drop it."""


class Stalled(Hold[StalledSettings]):
    """Closes groups before others are counted; it never waits."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._idle_clock = IdleClock(timedelta(seconds=self._settings.stalled_seconds or 0))

    def changes(self, conn: Connection, state: ServingState) -> list[GroupChange]:  # noqa: ARG002  of `Hold`
        settings, changes = self._settings, []
        now = rows.from_micros(clock(conn))  # the database's clock: this machine's may differ by hours
        if settings.stalled_seconds is not None:
            idle_before = self._idle_clock.earliest(now, timedelta(seconds=settings.stalled_seconds))
            changes.append(stalled.stalled(idle_before, settings.stalled_policy, now))
        if settings.unrewarded_seconds is not None:
            changes.append(stalled.unrewarded(now - timedelta(seconds=settings.unrewarded_seconds), now))
        return changes
