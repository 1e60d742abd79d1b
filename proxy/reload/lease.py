"""The lease that lets one proxy process at a time drive reloads.

The lease is renewed over a separate database connection, so a long queue of commits cannot delay the renewal. A
driver that can no longer prove that it holds the lease is cancelled before the lease may pass to another process.
Engines that come back are brought up to date together, each from when its own check has ended: they share the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from proxy.writer.client import Writer
from turnwise.errors import FilesNotRead, LeaseLost, StoreError
from turnwise.store import leases
from turnwise.store.database import Database

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE = "reload"
LEASE_SECONDS = 5.0
"""How long the lease lasts without a renewal: a reload that a crash interrupted is taken over after this time."""
RENEW_SECONDS = 1.0
MARGIN_SECONDS = 0.5
LOST = "the reload lease was lost; another process may drive the reload now"


class Shared:
    """One holding of the lease by several tasks: the first of them begins it, and the last one ends it."""

    def __init__(self) -> None:
        self.keeper: asyncio.Task[None]
        self.tasks: set[asyncio.Task[object]] = set()
        self.is_driver: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Set once the lease is held, or another process is found to hold it."""
        self.is_left = asyncio.Event()
        self.is_lost = False
        self.unread: FilesNotRead | None = None


class DriverLease:
    """Acquires, renews and releases the lease for one process."""

    def __init__(self, database: Database, writer: Writer) -> None:
        self._database = database
        self._writer = writer
        self._owner = uuid.uuid4().hex
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._shared: Shared | None = None
        self.token: int | None = None
        """Fencing token; None while this process does not hold the lease."""

    async def write(self, change: Callable[..., T], *arguments: object) -> T:
        """Write a result of driving in one transaction with a check of the lease, and return what `change` returns.

        Raises:
            LeaseLost: another process holds the lease now; nothing is written.
        """
        if self.token is None:
            raise LeaseLost("this process no longer holds the reload lease")
        return await self._writer.do(leases.under_lease, LEASE, self.token, LEASE_SECONDS, change, *arguments)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        """Hold the lease for the block; yield False while another process holds it.

        A block that ends with FilesNotRead keeps the lease until it expires, so that no other process starts the same
        read before this one comes back.

        Raises:
            LeaseLost: the lease could not be renewed; the block was cancelled.
        """
        is_kept = False
        async with self._turn():
            acquired_at = time.monotonic()
            token = await self._change(leases.acquire_lease, self._owner, LEASE_SECONDS)
            if token is None:
                yield False
                return
            self.token = token
            driver = asyncio.current_task()
            assert driver is not None
            renewing = asyncio.create_task(self._renew(token, acquired_at, driver))
            try:
                yield True
            except FilesNotRead:
                is_kept = True
                raise
            except asyncio.CancelledError:
                if self.token is not None:  # cancelled by somebody else, such as a shutdown
                    raise
                driver.uncancel()
                raise LeaseLost(LOST) from None
            finally:
                renewing.cancel()
                self.token = None
                if not is_kept:
                    with contextlib.suppress(StoreError):  # the lease then ends when it expires
                        await self._change(leases.renew_lease, token, 0)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[bool]:
        """Hold the lease for the block as `held` does, at the same time as blocks of other tasks that share it.

        A block does not join others while somebody waits to hold the lease alone.

        Raises:
            LeaseLost: the lease could not be renewed; the block was cancelled.
        """
        shared = self._shared
        if shared is None or (shared.is_driver.done() and self._num_waiting):
            shared = self._shared = Shared()
            shared.keeper = asyncio.create_task(self._keep(shared))
        task = asyncio.current_task()
        assert task is not None
        shared.tasks.add(task)
        try:
            yield await asyncio.shield(shared.is_driver)
        except FilesNotRead as error:
            shared.unread = error
            raise
        except asyncio.CancelledError:
            if not shared.is_lost:
                raise
            task.uncancel()
            raise LeaseLost(LOST) from None
        finally:
            shared.tasks.discard(task)
            if not shared.tasks:
                if self._shared is shared:
                    self._shared = None
                shared.is_left.set()
                await shared.keeper

    async def _keep(self, shared: Shared) -> None:
        """Hold the lease until the last task has left."""
        try:
            async with self.held() as is_driver:
                shared.is_driver.set_result(is_driver)
                if is_driver:
                    await self._until_left(shared)
                if shared.unread is not None:
                    raise shared.unread  # noqa: TRY301  which keeps the lease
        except (FilesNotRead, LeaseLost):
            pass
        except Exception as error:  # those who wait for the lease raise it
            if shared.is_driver.done():
                raise
            shared.is_driver.set_exception(error)

    async def _until_left(self, shared: Shared) -> None:
        try:
            await shared.is_left.wait()
        except asyncio.CancelledError:
            if self.token is None:  # lost: all stop at once, and nobody joins or holds it before they have
                shared.is_lost = True
                self._shared = None if self._shared is shared else self._shared
                for task in shared.tasks:
                    task.cancel()
                await shared.is_left.wait()
            raise

    async def _renew(self, token: int, held_since: float, driver: asyncio.Task[object]) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            started = time.monotonic()
            try:
                async with asyncio.timeout(held_since + LEASE_SECONDS - MARGIN_SECONDS - started):
                    is_held = await self._change(leases.renew_lease, token, LEASE_SECONDS)
            except (StoreError, TimeoutError) as error:
                log.warning("the reload lease could not be renewed: %s", str(error) or "no answer in time")
                is_held = time.monotonic() < held_since + LEASE_SECONDS - MARGIN_SECONDS - RENEW_SECONDS
            else:
                held_since = started
            if not is_held:
                self.token = None
                driver.cancel()
                return

    async def _change(self, change: Callable[..., T], *arguments: object) -> T:
        def call() -> T:
            with self._database.write() as connection:
                return change(connection, LEASE, *arguments)

        return await asyncio.to_thread(call)
