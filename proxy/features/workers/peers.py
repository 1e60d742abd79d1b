"""Messages between the workers of one proxy. Each worker has a link to the parent process, which passes messages on.

The link also shows both ends when the other one has ended: a worker whose parent has ended stops like after SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from proxy.features.workers.settings import WorkerSettings
from proxy.writer.frames import Link, frame
from turnwise.errors import TurnwiseError
from turnwise.telemetry.requests import random_hex

log = logging.getLogger(__name__)


class WorkerSetup(NamedTuple):
    """The parent's first message to a worker."""

    settings: WorkerSettings
    """With the worker's share of all limits, and the port that all workers listen on."""
    metrics_directory: Path
    """Directory of the metrics of all workers, and of the sockets by which they hand over connections."""
    number: int = 0
    """The number of this worker; one that replaces it gets the same."""


class WorkerReady(NamedTuple):
    """The worker serves."""


class WorkerFailed(NamedTuple):
    """The worker could not start."""

    error: TurnwiseError


class Announced(NamedTuple):
    """What one worker has changed: a name of `proxy.services.Services.changes`, which others follow, and of what."""

    name: str
    of: tuple[str, ...] = ()


class Awaited(NamedTuple):
    """A change that the other workers confirm."""

    change: Announced
    receipt: str


class Confirmed(NamedTuple):
    """A worker has applied a change. The parent sends it to the sender when all other workers that serve have."""

    receipt: str


class Peers:
    """The other workers of this proxy; none in a proxy of one process."""

    def __init__(self, link: socket.socket | None = None) -> None:
        """Keep the link to the parent; None if there are no other workers."""
        self._link = link
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._confirmed: dict[str, asyncio.Event] = {}
        """Set when all other workers have confirmed, by the receipt."""
        self._applying: set[asyncio.Task[None]] = set()

    async def connect(self, apply: Callable[[Announced], Coroutine[Any, Any, None]]) -> None:
        """Receive the changes of other workers from now on; they are applied in their order."""
        if self._link is None:
            return
        loop = asyncio.get_running_loop()

        async def apply_and_confirm(message: Announced | Awaited) -> None:
            if not isinstance(message, Awaited):
                await apply(message)
                return
            await apply(message.change)
            self.announce(Confirmed(message.receipt))

        def take(message: Announced | Awaited | Confirmed) -> None:
            if isinstance(message, Confirmed):
                if message.receipt in self._confirmed:
                    self._confirmed[message.receipt].set()
                return
            task = loop.create_task(apply_and_confirm(message))
            self._applying.add(task)
            task.add_done_callback(self._applying.discard)

        self._transport, _ = await loop.create_unix_connection(
            lambda: Link(take, self._stop_with_parent), sock=self._link.dup()
        )

    def close(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def _stop_with_parent(self) -> None:
        if not self._is_closing:
            os.kill(os.getpid(), signal.SIGTERM)

    def announce(self, message: Announced | Awaited | Confirmed | WorkerReady) -> None:
        """Send a change to all other workers, or a report to the parent."""
        if self._transport is not None:
            self._transport.writelines(frame(message))

    async def confirm(self, change: Announced, seconds: float) -> None:
        """Send a change to all other workers, and wait so long until those that serve have applied it."""
        if self._transport is None:
            return
        receipt = random_hex(16)
        confirmed = self._confirmed[receipt] = asyncio.Event()
        self.announce(Awaited(change, receipt))
        try:
            async with asyncio.timeout(seconds):
                await confirmed.wait()
        except TimeoutError:
            log.warning("a worker has not applied %s within %g s", change, seconds)
        finally:
            del self._confirmed[receipt]

    def report_failure(self, error: TurnwiseError) -> None:
        if self._link is not None:
            self._link.sendall(b"".join(frame(WorkerFailed(error))))
