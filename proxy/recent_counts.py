"""The counts of a tenant's rows, at a bounded rate.

Counting reads every session of the tenant and every update, and each open page asks for the counts every few seconds.
The counts of a tenant with few sessions are always read while there are few updates. Otherwise they are kept for a
time that grows with the number of rows, so that counting takes a bounded share of a processor. Counters that every
write keeps up to date would cost every turn.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import time
from collections.abc import Callable

from turnwise.store import overview, processes
from turnwise.store.database import Database
from turnwise.types import utc_now

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
        trainers = await self._database.fetch(processes.trainer_statuses, tenant)
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
