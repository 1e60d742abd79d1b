"""Records in which seconds each engine serves and runs calls, for the curve of the engines' idle share.

Each process samples its own calls once a second and stores the seconds every `WRITE_SECONDS`. Minutes that are dropped
are counted. What a process has not stored when it ends is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.engines.pool import EnginePool
from proxy.metrics import Counted, Metrics
from proxy.writer.client import Writer
from turnwise.errors import StoreError
from turnwise.features.page import activity

log = logging.getLogger(__name__)

WRITE_SECONDS = 10.0
MAX_WAITING = 1000
"""Minutes of engines that wait for a store that does not answer; the oldest are dropped."""
SAMPLED_AT = 0.95
"""Part of each second after which it is sampled."""
LOST_MINUTES: Counted = (
    "turnwise_lost_engine_activity_minutes",
    "Minutes of engines that are missing in the curve of their idle share, because the store did not answer",
    (),
)


class ActivityRecorder:
    """Samples the engines of a pool."""

    def __init__(self, pool: EnginePool, writer: Writer, metrics: Metrics) -> None:
        self._pool = pool
        self._writer = writer
        self._metrics = metrics
        self._lost = metrics.counter(*LOST_MINUTES)
        self._num_started: dict[str, int] = {}
        """Calls that an engine had started at the last sample, by URL."""
        self._waiting: dict[tuple[int, str], activity.Activity] = {}
        """What is not stored yet, by minute and engine."""

    async def run(self) -> None:
        """Sample and store until cancelled."""
        stored_at = time.monotonic()
        while True:
            await asyncio.sleep(1.0 - (time.time() - SAMPLED_AT) % 1.0)
            self.sample(time.time())
            if time.monotonic() - stored_at >= WRITE_SECONDS:
                stored_at = time.monotonic()
                await self.store()

    def sample(self, now: float) -> None:
        """Note which engines serve in the second of this instant, and which have run a call since the last sample."""
        minute, second = divmod(int(now), activity.MINUTE_SECONDS)
        for engine in self._pool.engines:
            is_busy = engine.num_calls > 0 or engine.num_started != self._num_started.get(engine.url, 0)
            self._num_started[engine.url] = engine.num_started
            if engine.is_serving or is_busy:
                before = self._waiting.get((minute, engine.url), activity.Activity(0, 0))
                bit = 1 << second
                self._waiting[minute, engine.url] = activity.Activity(
                    before.served | (bit if engine.is_serving else 0), before.busy | (bit if is_busy else 0)
                )

    async def store(self) -> None:
        """Store what was sampled; a failed write is repeated with the next one."""
        if not self._waiting:
            return
        stored, self._waiting = self._waiting, {}
        try:
            await self._writer.do(activity.add_activity, stored)
        except StoreError as error:
            self._metrics.background_errors.labels("engine_activity").inc()
            log.warning("the engines' activity could not be stored, will retry: %s", error)
            self._waiting = dict(sorted(stored.items())[-MAX_WAITING:])
            self._lost.inc(len(stored) - len(self._waiting))
