"""Which rewards people's feedback is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from turnwise.settings import FromJson, Settings
from turnwise.types import MAX_REWARD

FeedbackRewards = dict[Literal["up", "down", "correction"], float]


class FeedbackSettings(Settings):
    """What feedback is worth."""

    feedback_rewards: Annotated[FeedbackRewards, FromJson] = Field(default={"up": 1.0, "down": 0.0})
    """Rewards of a thumb up and of a thumb down in `POST /v1/feedback`, as JSON. A rating on a scale lies between
    them. With `correction` a comment or an edited reply is a reward too, of that name: set it to 0 where sessions are
    corrected and not rated, so that they are ready to be trained by the algorithm `correction`."""

    @field_validator("feedback_rewards")
    @classmethod
    def _has_both_rewards(cls, table: FeedbackRewards) -> FeedbackRewards:
        if not table.keys() >= {"up", "down"} or not all(abs(value) <= MAX_REWARD for value in table.values()):
            raise ValueError(f'{table!r} needs a reward for "up" and one for "down", from -1e6 to 1e6')
        return table
