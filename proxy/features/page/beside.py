"""What the page keeps of a process: counts, changes, places for searches; and what engines did, which it records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar

from proxy.features.page.activity import LOST_MINUTES, ActivityRecorder
from proxy.features.page.readings import LOST_EVENTS, Events, RecentCounts
from proxy.metrics import Counted
from proxy.services import Beside, Services

MAX_SEARCHES = 2
"""Searches in what sessions hold that run at once in one process; others wait."""


class Page(Beside):
    """Reads the store for the routes of lists, and records in which seconds engines run calls."""

    counters: ClassVar[Mapping[str, Counted]] = {"lost_events": LOST_EVENTS, "lost_activity": LOST_MINUTES}

    def __init__(self, services: Services) -> None:
        self.counts = RecentCounts(services.database)
        self.events = Events(services.database, services.metrics)
        self.searches = asyncio.Semaphore(MAX_SEARCHES)
        """Places for searches in what sessions hold: each may take a thread and a connection for seconds."""
        self._recorder = ActivityRecorder(services.pool, services.writer, services.metrics)

    async def run(self) -> None:
        await self._recorder.run()
