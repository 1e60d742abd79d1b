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


Change = SessionChanged | KeysChanged
"""A message that the parent passes on to the other workers."""


class Peers:
    """The other workers of this proxy; none in a proxy of one process."""

    def __init__(self, link: socket.socket | None = None) -> None:
        """Keep the link to the parent; None if there are no other workers."""
        self._link = link
        self._transport: asyncio.Transport | None = None

    async def connect(self, apply: Callable[[Change], None]) -> None:
        """Receive the changes of other workers from now on."""
        if self._link is not None:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_unix_connection(lambda: _ParentLink(apply), sock=self._link.dup())

    def close(self) -> None:
        """Receive no more messages."""
        if self._transport is not None:
            self._transport.close()

    def announce(self, change: Change) -> None:
        """Send a change to all other workers."""
        if self._transport is not None:
            self._transport.writelines(frame(change))

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

    def __init__(self, apply: Callable[[Change], None]) -> None:
        self._apply = apply
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for change in self._frames.feed(data):
            self._apply(change)

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
