"""The engine's end of a transfer: it receives a version while the engine continues to sample, and checks it.

A thread receives into memory of its own. The model is not touched until `take`, which gives out a version only if all
of it arrived and its checksum is right. So a half-sent version changes nothing. The memory is used again for the next
version. Where there is a GPU it is pinned, because copies from pageable memory to a GPU are slow.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from turnwise.engine_plugin.channel import CHUNK_BYTES, Channel, TensorLayout, TransferFailed, checksum_of

log = logging.getLogger(__name__)
ENDING_SECONDS = 1.0
"""How long a transfer that was called off may take to end before the next one."""
_cuda: Any = torch.cuda
"""Untyped, because torch's stubs lack the type of `cudart`."""


@dataclasses.dataclass
class TransferInfo:
    """What an engine needs to know to receive a version: the body of `/init_weight_transfer_engine`."""

    version: int
    host: str
    port: int
    world_size: int
    """Members of the group: the trainer, and the workers of its engines."""
    layout: list[list[Any]]
    checksum: str
    chunk_bytes: int = CHUNK_BYTES
    seconds: float = 60.0
    first_rank: int = 1
    """Of the engine's workers in the group."""


class Receiver:
    """Receives versions, one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._layout = TensorLayout([])
        self._buffer = torch.zeros(0, dtype=torch.uint8)
        self._is_pinned = False
        self._held: int | None = None
        """Version that the buffer holds; None while it is written."""
        self._error: str | None = None

    def begin(self, info: TransferInfo, worker: int) -> None:
        """Start to receive a version, as the worker with this number in its engine, from 0.

        Raises:
            TransferFailed: Another one is still received.
        """
        self._wait(ENDING_SECONDS)
        self._held, self._error = None, None
        # A new thread would pin memory through the first GPU, which another worker may use.
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
        given = info, info.first_rank + worker, gpu
        self._thread = threading.Thread(target=self._receive, args=given, name="weights", daemon=True)
        self._thread.start()

    def take(self, version: int, seconds: float) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a version that arrived, in the order of its layout.

        Raises:
            TransferFailed: It did not arrive whole.
        """
        self._wait(seconds)
        if self._held != version:
            raise TransferFailed(f"version {version} did not arrive: {self._error or 'no transfer was started'}")
        return self._layout.views(self._buffer)

    def _wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise TransferFailed("another transfer to this engine is still running; try again when it has ended")

    def _receive(self, info: TransferInfo, rank: int, gpu: int | None) -> None:
        try:
            channel = Channel.join(info.host, info.port, rank=rank, size=info.world_size, seconds=info.seconds)
            self._layout = TensorLayout(info.layout)
            if len(self._buffer) != self._layout.num_bytes:
                self._allocate(self._layout.num_bytes, gpu)
            channel.broadcast(self._buffer, info.chunk_bytes)
            problem = self._problem(info)
            if channel.agree(problem is None):
                self._held = info.version
            else:
                self._error = problem or "another worker did not receive it"
        except (TransferFailed, ValueError) as error:
            self._error = str(error)

    def _allocate(self, num_bytes: int, gpu: int | None) -> None:
        """Replace the buffer. It is pinned in place: torch's own pinned memory is rounded up to a power of two."""
        if self._is_pinned:
            _cuda.cudart().cudaHostUnregister(self._buffer.data_ptr())
        self._buffer, self._is_pinned = torch.zeros(num_bytes, dtype=torch.uint8), False
        if gpu is None or not num_bytes:
            return
        with torch.cuda.device(gpu):
            status = int(_cuda.cudart().cudaHostRegister(self._buffer.data_ptr(), num_bytes, 0))
        self._is_pinned = status == 0
        if not self._is_pinned:
            log.warning("memory for weights is not pinned, so loads are slower: cudaHostRegister returned %d", status)

    def _problem(self, info: TransferInfo) -> str | None:
        found = checksum_of(self._buffer)
        return None if found == info.checksum else f"the checksum of what arrived is {found}, not {info.checksum}"
