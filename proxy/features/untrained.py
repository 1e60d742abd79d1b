"""Tells the operator that calls are sampled in a way that is not trained."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from proxy.services import Beside
from turnwise.chains import is_trainable
from turnwise.errors import TurnwiseError
from turnwise.features.untrained import newest_samplings
from turnwise.sampling import ADVICE, count_not_trained, left_out_by, why_not_trained

if TYPE_CHECKING:
    from proxy.services import Services
    from turnwise.types import Json, Turn

log = logging.getLogger(__name__)
SAMPLING_SECONDS = 30.0
"""How often the sampling parameters of the newest turns are read."""


class Untrained(Beside):
    """Says of each turn why it is not trained, and logs it of the newest ones whenever there is another reason."""

    def __init__(self, services: Services) -> None:
        self._database = services.database
        self._metrics = services.metrics
        self._left_out_by: set[str | None] = set()
        services.turn_fields.append(_shown)

    async def run(self) -> None:
        while True:
            try:
                newest = await self._database.fetch(newest_samplings, None)
            except TurnwiseError as error:
                self._metrics.background_errors.labels("sweep").inc()
                log.warning("could not read how calls are sampled, will retry: %s", error)
            else:
                reasons = {left_out_by(*each) for each in newest} - {None}
                if reasons - self._left_out_by:
                    log.warning("%s %s", count_not_trained(newest), ADVICE)
                self._left_out_by = reasons
            await asyncio.sleep(SAMPLING_SECONDS)


def _shown(turn: Turn) -> Json:
    return {"not_trained": why_not_trained(turn.sampling, turn.parts) if is_trainable(turn) else None}
