"""Messages between the workers of one proxy. Each worker has a link to the parent process, which passes messages on.

The link also shows both ends when the other one has ended: a worker whose parent has ended stops like after SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from proxy.settings import ProxySettings
from proxy.writer.process import Frames, frame
from turnwise.errors import TurnwiseError


class WorkerSetup(NamedTuple):
    """The parent's first message to a worker."""

    settings: ProxySettings
    """With the worker's share of all limits, and the port that all workers listen on."""
    metrics_directory: Path
    """Directory of the metrics of all workers."""


class WorkerReady(NamedTuple):
    """The worker serves."""


class WorkerFailed(NamedTuple):
    """The worker could not start."""

    error: TurnwiseError


class SessionChanged(NamedTuple):
    """A session's row has changed in the store: the other workers must read it again."""

    tenant: str
    session_id: str


class KeysChanged(NamedTuple):
    """Keys were made, revoked or deleted."""


class WeightsLoaded(NamedTuple):
    """An engine has loaded other weights and is paused: its next tokens are of the version that its label names."""

    engine_url: str
    label: str
    receipt: str
    """What the other workers confirm it with."""


class WeightsNoted(NamedTuple):
    """A worker confirms a `WeightsLoaded`."""

    receipt: str


Change = SessionChanged | KeysChanged | WeightsLoaded
"""A message that the parent passes on to the other workers."""


class Peers:
    """The other workers of this proxy; none in a proxy of one process."""

    def __init__(self, link: socket.socket | None = None) -> None:
        """Keep the link to the parent; None if there are no other workers."""
        self._link = link
        self._transport: asyncio.Transport | None = None
        self._noted: dict[str, asyncio.Semaphore] = {}
        """One release for each worker that has confirmed, by the receipt."""

    async def connect(self, apply: Callable[[Change], None]) -> None:
        """Receive the changes of other workers from now on."""

        def receive(message: Change | WeightsNoted) -> None:
            if isinstance(message, WeightsNoted):
                if message.receipt in self._noted:
                    self._noted[message.receipt].release()
                return
            apply(message)
            if isinstance(message, WeightsLoaded):
                self._send(WeightsNoted(message.receipt))

        if self._link is not None:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: _ParentLink(receive), sock=self._link.dup())

    def close(self) -> None:
        """Receive no more messages."""
        if self._transport is not None:
            self._transport.close()

    def announce(self, change: Change) -> None:
        """Send a change to all other workers."""
        self._send(change)

    async def confirm(self, loaded: WeightsLoaded, num_others: int, seconds: float) -> bool:
        """Send a change to all other workers; return whether so many have applied it within the time."""
        noted = self._noted[loaded.receipt] = asyncio.Semaphore(0)
        self._send(loaded)
        try:
            async with asyncio.timeout(seconds):
                for _ in range(num_others):
                    await noted.acquire()
        except TimeoutError:
            return False
        finally:
            del self._noted[loaded.receipt]
        return True

    def _send(self, message: object) -> None:
        if self._transport is not None:
            self._transport.writelines(frame(message))

    def report_ready(self) -> None:
        """Tell the parent that this worker serves."""
        if self._transport is not None:
            self._transport.writelines(frame(WorkerReady()))

    def report_failure(self, error: TurnwiseError) -> None:
        """Tell the parent why this worker cannot start."""
        if self._link is not None:
            self._link.sendall(b"".join(frame(WorkerFailed(error))))


class _ParentLink(asyncio.Protocol):
    """The socket to the parent."""

    def __init__(self, receive: Callable[[Change | WeightsNoted], None]) -> None:
        self._receive = receive
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._receive(message)

    def eof_received(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def receive_setup(link: socket.socket) -> WorkerSetup:
    """Return the parent's first message.

    Raises:
        EOFError: the parent has ended.
    """
    frames = Frames()
    while data := link.recv(1 << 16):
        for message in frames.feed(data):
            assert isinstance(message, WorkerSetup)
            return message
    raise EOFError("the parent of this worker has ended")
