"""A connection between the trainer, as rank 0, and the workers of one engine: a gloo group of torch's.

Gloo works on any network and beside any device, and each wait has a time limit, so an engine survives a trainer that
dies. Each transfer has its own group, so nothing of a dead process is left in the next one. The trainer listens for the
rendezvous on its own address only.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_dist: Any = torch.distributed
"""Untyped, because torch's stubs lack stores and process groups."""

CHUNK_BYTES = 32 * 2**20
SENDER = 0


class TransferFailed(Exception):
    """A transfer that did not complete; the message says why."""


class Rendezvous:
    """Where the members of a group find one another; made by the trainer."""

    def __init__(self, host: str, seconds: float) -> None:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self.store = _dist.TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Channel:
    """One member of a group that carries a version."""

    def __init__(self, store: Any, *, rank: int, size: int, address: str, seconds: float) -> None:
        try:
            options = _dist.ProcessGroupGloo._Options()  # noqa: SLF001  torch has no other way to set them
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
            options._timeout = timedelta(seconds=seconds)  # noqa: SLF001
            self._group: Any = _dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise TransferFailed(f"rank {rank} of {size} did not meet the others within {seconds:g} s") from error

    @classmethod
    def join(cls, host: str, port: int, *, rank: int, size: int, seconds: float) -> Channel:
        """Join the trainer's group.

        Raises:
            TransferFailed: The trainer does not answer, or the others do not come.
        """
        try:
            with socket.create_connection((host, port), seconds) as probe:
                address = str(probe.getsockname()[0])
            store = _dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        except (OSError, RuntimeError) as error:
            raise TransferFailed(f"the trainer at {host}:{port} does not answer: {error}") from error
        return cls(store, rank=rank, size=size, address=address, seconds=seconds)

    def broadcast(self, buffer: Tensor, chunk_bytes: int) -> None:
        """Send the buffer, or fill it with what the trainer sends, in chunks that all members agree on.

        Raises:
            TransferFailed: The connection broke, or the time limit passed.
        """
        try:
            for start in range(0, len(buffer), chunk_bytes):
                self._group.broadcast(buffer[start : start + chunk_bytes], SENDER).wait()
        except RuntimeError as error:
            raise TransferFailed(f"the transfer broke off: {_first_line(error)}") from error

    def agree(self, is_good: bool) -> bool:
        """Return whether all members pass True.

        Raises:
            TransferFailed: The connection broke, or the time limit passed.
        """
        failures = torch.tensor([0 if is_good else 1], dtype=torch.int32)
        try:
            self._group.allreduce([failures]).wait()
        except RuntimeError as error:
            raise TransferFailed(f"the transfer broke off: {_first_line(error)}") from error
        return int(failures.item()) == 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
