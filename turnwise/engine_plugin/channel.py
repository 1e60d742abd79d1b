"""A connection between the trainer, as rank 0, and the workers of one engine: a process group of torch's.

Each transfer has its own group, so nothing of a dead process is left in the next one. The trainer listens for the
rendezvous on its own address only. Every wait has a time limit.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

Transport = Literal["gloo", "nccl"]

_dist: Any = torch.distributed
"""Untyped, because torch's stubs lack stores and process groups."""

CHUNK_BYTES = 32 * 2**20
"""Bytes of one broadcast."""
SENDER = 0
"""Rank of the trainer."""


class TransferFailed(Exception):
    """A transfer that did not complete; the message says why."""


class Rendezvous:
    """Where the members of a group find one another; made by the trainer."""

    def __init__(self, host: str, seconds: float) -> None:
        listener = socket.create_server((host, 0), family=_family(host))
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

    def __init__(self, store: Any, *, rank: int, size: int, transport: Transport, address: str, seconds: float) -> None:
        self._device = torch.device("cpu")
        limit = timedelta(seconds=seconds)
        self._group: Any
        try:
            if transport == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())
                options = _dist.ProcessGroupNCCL.Options()
                options._timeout = limit  # noqa: SLF001  torch has no other way to set it
                self._group = _dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                options = _dist.ProcessGroupGloo._Options()  # noqa: SLF001  as above
                options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
                options._timeout = limit  # noqa: SLF001
                self._group = _dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as error:
            raise TransferFailed(f"rank {rank} of {size} did not meet the others within {seconds:g} s") from error

    @classmethod
    def join(cls, host: str, port: int, *, rank: int, size: int, transport: Transport, seconds: float) -> Channel:
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
        return cls(store, rank=rank, size=size, transport=transport, address=address, seconds=seconds)

    def broadcast(self, buffer: Tensor, chunk_bytes: int) -> None:
        """Send the buffer, or fill it with what the trainer sends, in chunks that all members agree on.

        Raises:
            TransferFailed: The connection broke, or the time limit passed.
        """
        try:
            for start in range(0, len(buffer), chunk_bytes):
                part = buffer[start : start + chunk_bytes]
                carried = part.to(self._device)
                self._group.broadcast(carried, SENDER).wait()
                if carried.data_ptr() != part.data_ptr():
                    part.copy_(carried)
        except RuntimeError as error:
            raise TransferFailed(f"the transfer broke off: {_first_line(error)}") from error

    def agree(self, is_good: bool) -> bool:
        """Return whether all members pass True.

        Raises:
            TransferFailed: The connection broke, or the time limit passed.
        """
        failures = torch.tensor([0 if is_good else 1], dtype=torch.int32, device=self._device)
        try:
            self._group.allreduce([failures]).wait()
        except RuntimeError as error:
            raise TransferFailed(f"the transfer broke off: {_first_line(error)}") from error
        return int(failures.item()) == 0


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
