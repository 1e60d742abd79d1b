"""Tells the operator that calls are sampled in a way that is not trained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from proxy.services import Beside
from turnwise.chains import is_trainable
from turnwise.errors import TurnwiseError
from turnwise.features.untrained import newest_samplings, trained_shares
from turnwise.sampling import ADVICE, count_not_trained, left_out_by, why_not_trained

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from proxy.metrics import Counted
    from proxy.services import Services
    from turnwise.store.database import Connection
    from turnwise.types import Json, Turn

log = logging.getLogger(__name__)
SAMPLING_SECONDS = 30.0
"""How often the sampling parameters of the newest turns are read."""


class Untrained(Beside):
    """Says of each turn why it is not trained, and logs it of the newest ones whenever there is another reason."""

    gauges: ClassVar[Mapping[str, Counted]] = {
        "share": (
            "turnwise_trained_share",
            "Share of the sampled tokens that were trained, of the newest 200 sessions that have been or were dropped",
            ("by", "name", "tenant"),
        )
    }
    share: Gauge

    def __init__(self, services: Services) -> None:
        self._database = services.database
        self._metrics = services.metrics
        self._left_out_by: set[str | None] = set()
        services.turn_fields.append(_shown)
        services.gauges.append(self._read_shares)

    def _read_shares(self, connection: Connection) -> None:
        for each in trained_shares(connection):
            self.share.labels(each.by, each.name, each.tenant).set(each.num_trained / (each.num_sampled or 1))

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
