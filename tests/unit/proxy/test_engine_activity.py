"""The seconds in which engines run calls: sampled once a second, stored with the next write that succeeds."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.engines.activity import MAX_WAITING, ActivityRecorder
from proxy.engines.engine import EngineState
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from turnwise.errors import StoreError
from turnwise.store.database import Database
from turnwise.store.processes import Activity
from turnwise.types import Session

MINUTE = 29_000_000
NO_STORE = Database("sqlite:///never-opened.db")
"""Never opened: no policy is on trial."""


class FailingOnce:
    def __init__(self) -> None:
        self.num_writes = 0
        self.stored: dict[tuple[int, str], Activity] = {}

    async def do(self, change: Any, seen: dict[tuple[int, str], Activity]) -> None:
        self.num_writes += 1
        if self.num_writes == 1:
            raise StoreError("the store does not answer")
        self.stored |= seen


def test_minutes_that_wait_too_long_for_the_store_are_dropped_and_counted():
    """Of 1,003 minutes the three oldest are dropped."""

    async def run() -> None:
        writer, metrics = FailingOnce(), Metrics()
        pool = EnginePool(["http://a"], metrics, NO_STORE, timeout_seconds=1)
        recorder = ActivityRecorder(pool, writer, metrics)  # type: ignore[arg-type]
        pool.engines[0].change(EngineState.READY)
        for minute in range(MAX_WAITING + 3):
            recorder.sample(60 * (MINUTE + minute))
        await recorder.store()
        assert b"\nturnwise_lost_engine_activity_minutes_total 3.0\n" in metrics.render()
        await recorder.store()
        assert sorted(writer.stored) == [(MINUTE + minute, "http://a") for minute in range(3, MAX_WAITING + 3)]
        await pool.close()

    asyncio.run(run())


def test_a_second_is_busy_if_a_call_ran_in_it_however_short():
    async def run() -> None:
        writer, metrics = FailingOnce(), Metrics()
        pool = EnginePool(["http://a", "http://b"], metrics, NO_STORE, timeout_seconds=1)
        recorder = ActivityRecorder(pool, writer, Metrics())  # type: ignore[arg-type]
        pool.engines[0].change(EngineState.READY)
        recorder.sample(60 * MINUTE)  # second 0: no call
        session = Session(session_id="s")
        pool.release(await pool.admit(session))  # it ends before the sample of second 1
        recorder.sample(60 * MINUTE + 1.9)
        lane = await pool.admit(session)
        assert b"\nturnwise_calls_in_flight 1.0\n" in metrics.render()
        recorder.sample(60 * MINUTE + 2)
        await recorder.store()
        recorder.sample(60 * MINUTE + 3)  # it still runs
        pool.release(lane)
        recorder.sample(60 * MINUTE + 4)
        await recorder.store()
        # Seconds 0 to 4 were served and 1 to 3 busy; what the first write did not store came with the second.
        assert writer.stored == {(MINUTE, "http://a"): Activity(served=0b11111, busy=0b01110)}
        await pool.close()

    asyncio.run(run())
