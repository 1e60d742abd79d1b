"""Changes of sessions, versions and updates, for listeners of `GET /v1/events`.

The store is read once a second for each tenant that has listeners, and two readings are compared. So a listener sees
the changes of all workers, proxies and trainers on the store, and a call pays nothing. Without listeners nothing is
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from proxy.metrics import Metrics
from turnwise.errors import Overloaded, StoreError
from turnwise.store.changes import State, read_state
from turnwise.store.database import Database
from turnwise.types import Json

log = logging.getLogger(__name__)

READ_SECONDS = 1.0
"""Pause between two readings of the store."""
MAX_LISTENERS = 100
"""Listeners of one process."""
MAX_TENANT_LISTENERS = 25
"""Listeners of one tenant in one process, so that no tenant takes the places of the others."""
MAX_WAITING = 1000
"""Events that wait for one listener; a listener that reads slower loses them and is told so."""


class Event(NamedTuple):
    """A change."""

    kind: str
    """`session`, `policy` or `update`: the object that is new or has changed; `lost`: events were dropped."""
    data: Json
    """The object's state."""


class Listener:
    """The events of one tenant that one client has not received yet."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[Event | None] = asyncio.Queue()
        self._is_closed = False

    def put(self, event: Event) -> bool:
        """Add an event; return whether there was room. Otherwise a single `lost` event replaces all that wait."""
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put_nowait(event)
            return True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(Event("lost", {}))
        return False

    def close(self) -> None:
        """End the stream of events."""
        self._is_closed = True
        self._waiting.put_nowait(None)

    async def next(self) -> Event | None:
        """Return the next event; None after `close`."""
        return None if self._is_closed else await self._waiting.get()


class _Reader(NamedTuple):
    """What reads a tenant's changes."""

    task: asyncio.Task[None]
    has_read: asyncio.Event
    """Set once there is a first reading, with which the next is compared."""


class Events:
    """Reads changes from the store and passes them on to listeners."""

    def __init__(self, database: Database, metrics: Metrics) -> None:
        self._database = database
        self._metrics = metrics
        self._listeners: dict[str, set[Listener]] = {}
        """By tenant."""
        self._readers: dict[str, _Reader] = {}
        """By tenant."""
        metrics.compute(metrics.event_listeners, lambda: self._num_listeners)

    @property
    def _num_listeners(self) -> int:
        return sum(map(len, self._listeners.values()))

    def check_room(self, tenant: str) -> None:
        """Check that another client of a tenant may listen.

        Raises:
            Overloaded: there are `MAX_LISTENERS` listeners, or `MAX_TENANT_LISTENERS` of the tenant.
        """
        if len(self._listeners.get(tenant, ())) >= MAX_TENANT_LISTENERS:
            raise Overloaded(
                f"{MAX_TENANT_LISTENERS} clients of this tenant listen to events, which is the limit; close one, or "
                "retry later"
            )
        if self._num_listeners >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} clients listen to events, which is the limit; retry later")

    @contextlib.asynccontextmanager
    async def listener(self, tenant: str) -> AsyncIterator[Listener]:
        """Return a listener to a tenant's changes from now on, until the block ends."""
        listener = Listener()
        self._listeners.setdefault(tenant, set()).add(listener)
        if tenant not in self._readers:
            has_read = asyncio.Event()
            self._readers[tenant] = _Reader(asyncio.create_task(self._read(tenant, has_read)), has_read)
        try:
            await self._readers[tenant].has_read.wait()
            yield listener
        finally:
            self._listeners[tenant].discard(listener)
            if not self._listeners[tenant]:
                del self._listeners[tenant]
                self._readers.pop(tenant).task.cancel()

    async def close(self) -> None:
        """End all streams of events."""
        for listener in [each for own in self._listeners.values() for each in own]:
            listener.close()
        readers = [reader.task for reader in self._readers.values()]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, tenant: str, has_read: asyncio.Event) -> None:
        """Compare readings of the store until cancelled."""
        known: State | None = None
        while True:
            try:
                state = await self._database.fetch(read_state, tenant)
                for event in [] if known is None else changes_between(known, state):
                    self._send(tenant, event)
                known = state
                has_read.set()
            except StoreError as error:
                self._metrics.background_errors.labels("events").inc()
                log.warning("changes could not be read from the store, will retry: %s", error)
            await asyncio.sleep(READ_SECONDS)

    def _send(self, tenant: str, event: Event) -> None:
        for listener in self._listeners.get(tenant, ()):
            if not listener.put(event):
                self._metrics.lost_events.inc()


def changes_between(before: State, after: State) -> Iterator[Event]:
    """Yield an event for each object that is new or has changed; objects of a deleted session get none."""
    for (kind, name), fields in after.items():
        if before.get((kind, name)) != fields:
            yield Event(kind, fields)
