"""How old the counts of a tenant may be, and which changes the listeners of `GET /v1/events` get.

Counting reads every session of the tenant and every update, and each open page asks for the counts every few seconds.
The counts of a tenant with few sessions are always read while there are few updates. Otherwise they are kept for a
time that grows with the number of rows, so that counting takes a bounded share of a processor. Counters that every
write keeps up to date would cost every turn.

Each listener compares two readings of the store, a second apart, or more where its client reads slowly. So it sees the
changes of all workers, proxies and trainers on the store, nothing waits in memory for a client, and a call pays
nothing. The listeners of a tenant share their readings. Without listeners nothing is read.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

import cachetools

from proxy.features.places import Places
from proxy.metrics import Metrics
from turnwise.errors import StoreError
from turnwise.features.page import overview
from turnwise.store import trainer_reports
from turnwise.store.database import Database
from turnwise.types import Json, utc_now

ROWS_PER_SECOND = 10_000
"""Rows that are counted in a second, on average: a tenant's sessions and groups, and all updates. If there are fewer,
they are always counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """Counts, and when they were read."""

    counts: overview.Counts
    counted_at: datetime.datetime
    valid_until: float
    """On the cache's clock."""


class RecentCounts:
    """Reads the counts of tenants, and keeps those of large ones."""

    def __init__(
        self, database: Database, *, rows_per_second: int = ROWS_PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._rows_per_second = rows_per_second
        self._clock = clock
        self._kept: dict[str, Counted] = {}
        """Only of tenants with more rows than are counted in a second."""
        self._locks: collections.defaultdict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)

    async def read(self, tenant: str) -> Counted:
        """Return the counts of a tenant; the reports of trainers in them are always new."""
        if tenant not in self._kept:
            return await self._count(tenant)
        async with self._locks[tenant]:
            kept = self._kept.get(tenant)
            if kept is None or self._clock() >= kept.valid_until:
                return await self._count(tenant)
        trainers = await self._database.fetch(trainer_reports.trainer_statuses, tenant)
        return dataclasses.replace(kept, counts=dataclasses.replace(kept.counts, trainers=trainers))

    def forget(self, tenant: str) -> None:
        self._kept.pop(tenant, None)

    async def _count(self, tenant: str) -> Counted:
        counted_at = utc_now()
        counts = await self._database.fetch(overview.count_rows, tenant)
        num_rows = sum(counts.sessions.values()) + sum(counts.groups.values()) + counts.num_updates
        counted = Counted(counts, counted_at, self._clock() + num_rows / self._rows_per_second)
        if num_rows > self._rows_per_second:
            self._kept[tenant] = counted
        else:
            self._kept.pop(tenant, None)
        return counted


log = logging.getLogger(__name__)

READ_SECONDS = 1.0
"""Pause between two readings of the store."""
SHARED_SECONDS = 0.5
"""How long a reading is used for the other listeners of its tenant."""
MAX_LISTENERS = 100
"""Listeners of one process."""
MAX_TENANT_LISTENERS = 25
"""Listeners of one tenant in one process, so that no tenant takes the places of the others."""


LOST_EVENTS = ("turnwise_lost_events", "Times that a slow client of `GET /v1/events` lost events", ())


class Event(NamedTuple):
    """A change."""

    kind: str
    """`session`, `policy` or `update`: the object that is new or has changed; `lost`: events were dropped."""
    data: Json


class Events:
    """Reads changes from the store for each listener."""

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self.listeners = Places("listen to events", MAX_LISTENERS, MAX_TENANT_LISTENERS)
        self._readings: cachetools.TTLCache[str, overview.State] = cachetools.TTLCache(MAX_LISTENERS, SHARED_SECONDS)
        self._is_reading = asyncio.Lock()
        self._lost = metrics.counter(*LOST_EVENTS)
        metrics.compute(metrics.event_listeners, self.listeners.num_taken)

    async def changes(self, tenant: str, closing: asyncio.Future[None]) -> AsyncIterator[list[Event]]:
        """Yield the changes that each reading shows, which may be none, until the server stops; the first shows none.

        Args:
            tenant: whose changes.
            closing: done when the server stops.
        """
        known: overview.State | None = None
        with self.listeners.taken(tenant):
            while not closing.done():
                try:
                    state = await self._read(tenant)
                except StoreError as error:
                    self._metrics.background_errors.labels("events").inc()
                    log.warning("changes could not be read from the store, will retry: %s", error)
                else:
                    found = [] if known is None else list(changes_between(known, state))
                    self._lost.inc(sum(event.kind == "lost" for event in found))
                    yield found
                    known = state
                await asyncio.wait([closing], timeout=READ_SECONDS)

    async def _read(self, tenant: str) -> overview.State:
        async with self._is_reading:
            state = self._readings.get(tenant)
            if state is None:
                state = self._readings[tenant] = await self._database.fetch(overview.read_state, tenant)
            return state


def changes_between(before: overview.State, after: overview.State) -> Iterator[Event]:
    """Yield an event for each object that is new or has changed; objects of a deleted session get none.

    If all sessions of a reading are new, there may have been others: then `lost` comes first.
    """
    if sum(kind == "session" for kind, _ in after.keys() - before.keys()) >= overview.NUM_SESSIONS:
        yield Event("lost", {})
    for (kind, name), fields in after.items():
        if before.get((kind, name)) != fields:
            yield Event(kind, fields)
