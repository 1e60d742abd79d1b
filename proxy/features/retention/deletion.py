"""Deletion of sessions, tenants and what is older than the retention, in short transactions beside the calls."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from proxy.features.retention.settings import RetentionSettings
from proxy.services import Beside, Services
from turnwise.errors import TurnwiseError
from turnwise.features import retention
from turnwise.features.retention import Deleted
from turnwise.types import utc_now

if TYPE_CHECKING:
    from turnwise.store.database import Connection

log = logging.getLogger(__name__)
P = ParamSpec("P")
SWEEP_SECONDS = 5.0
"""How often the rows of deleted sessions, which another process may have deleted, are swept."""


class Retention(Beside):
    """Deletes at once what callers ask for, and later what is old and the rows that deletions have left."""

    def __init__(self, services: Services) -> None:
        self._services = services
        settings = services.settings
        self._days = settings.retention_days if isinstance(settings, RetentionSettings) else None
        self._has_deleted = asyncio.Event()
        """Set when sessions were deleted whose rows are to be swept."""

    async def run(self) -> None:
        """Delete what is old, and the rows of deleted sessions, until cancelled."""
        services = self._services
        while True:
            try:
                await self._prune()
                has_deleted = self._has_deleted.is_set()
                await self._sweep()
                if has_deleted:
                    await asyncio.to_thread(services.database.truncate_log)
            except TurnwiseError as error:
                services.metrics.background_errors.labels("sweep").inc()
                log.warning("could not delete old data, will retry: %s", error)
            except Exception:  # the task's outermost edge: an unexpected error must not end it
                services.metrics.background_errors.labels("sweep").inc()
                log.exception("a deletion of old data failed unexpectedly, will retry")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_SECONDS):  # `wait_for` of Python 3.11 may swallow a cancellation
                    await self._has_deleted.wait()

    async def delete_all(
        self, delete_some: Callable[Concatenate[Connection, P], Deleted], *arguments: P.args, **options: P.kwargs
    ) -> Deleted:
        """Repeat a deletion, one short transaction each time, while it has more; then wake what sweeps the rest.

        Raises:
            StoreUnavailable: when a transaction could not be committed in time; those before it are.
        """
        total = Deleted()
        while True:
            async with self._services.writer.slices:
                deleted = await self._services.writer.do(delete_some, *arguments, **options)
            total += deleted
            if not deleted.has_more:
                break
        self._has_deleted.set()
        for tenant, session_id in total.sessions:
            self._services.forget_session(tenant, session_id)
        return total

    async def _prune(self) -> None:
        """Delete sessions that are older than the retention, if one is set."""
        if self._days is not None:
            await self.delete_all(retention.prune, utc_now() - datetime.timedelta(days=self._days))

    async def _sweep(self) -> None:
        """Delete the rows of deleted sessions, one short transaction each time."""
        self._has_deleted.clear()
        has_more = True
        while has_more:
            async with self._services.writer.slices:
                has_more = await self._services.writer.do(retention.sweep)
