"""How long sessions are kept."""

from __future__ import annotations

from pydantic import Field

from turnwise.settings import Settings


class RetentionSettings(Settings):
    """What is deleted because it is old."""

    retention_days: float | None = Field(default=None, gt=0)
    """Sessions that were over this many days ago are deleted with their turns and rewards, once they are trained or
    dropped; None keeps them."""
