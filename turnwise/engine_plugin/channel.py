"""How a version goes from the trainer, as rank 0, to the workers of engines: one buffer, over a gloo group.

Every transfer moves parts of the buffer, so its checksum shows that a version arrived whole, whichever way it came.
Tensors are aligned to 16 bytes; the bytes between them are zero.

Gloo works on any network and beside any device, and each wait has a time limit, so an engine survives a trainer that
dies. Each transfer has its own group, so nothing of a dead process is left in the next one. The trainer listens for the
rendezvous on its own address only, and the group is made once all have come: who waits can be told that it is off.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed
from torch import Tensor

ALIGNMENT = 16
"""Bytes; a multiple of 8, so that the buffer is a whole number of 64-bit words."""
BLOCK_WORDS = 1 << 20


class Slot(NamedTuple):
    """The place of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorLayout:
    """The places of all tensors of a version, in their order, from what `as_json` returns.

    Raises:
        ValueError: `described` does not describe tensors.
    """

    def __init__(self, described: Iterable[Sequence[Any]]) -> None:
        self._slots: list[Slot] = []
        self.num_bytes = 0
        for name, dtype_name, sizes in described:
            dtype, shape = _dtype(str(dtype_name)), tuple(map(int, sizes))
            end = self.num_bytes + math.prod(shape) * dtype.itemsize
            self._slots.append(Slot(str(name), dtype, shape, self.num_bytes, end))
            self.num_bytes = -(-end // ALIGNMENT) * ALIGNMENT

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls((name, _name_of(tensor.dtype), tensor.shape) for name, tensor in tensors.items())

    def as_json(self) -> list[list[Any]]:
        return [[slot.name, _name_of(slot.dtype), list(slot.shape)] for slot in self._slots]

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new buffer with these tensors. [num_bytes], uint8."""
        buffer = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for name, view in self.views(buffer):
            view.copy_(tensors[name])
        return buffer

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        for slot in self._slots:
            yield slot.name, buffer[slot.begin : slot.end].view(slot.dtype).view(slot.shape)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"{name!r} is not a dtype of torch")


def checksum_of(buffer: Tensor) -> str:
    """Return a checksum of a buffer: the sum of its 64-bit words, each times its odd number, modulo 2**64.

    It shows changed, missing and displaced words at the speed of memory; it is no protection against forgery.
    """
    words = buffer.view(torch.int64)
    weights = torch.arange(1, 2 * min(BLOCK_WORDS, len(words)) + 1, 2)
    total = 0
    for start in range(0, len(words), BLOCK_WORDS):
        block = words[start : start + BLOCK_WORDS]
        total += int((block * weights[: len(block)]).sum()) + 2 * start * int(block.sum())
    return f"{total % 2**64:016x}"


_dist: Any = torch.distributed
"""Untyped, because torch's stubs lack stores and process groups."""

CHUNK_BYTES = 32 * 2**20
SENDER = 0
"""The trainer's rank."""
PAIR = 2
"""Members of a group in which nobody can pass anything on."""
HERE, START = "here/%d", "start"
"""Keys of the rendezvous: that a rank has come, and whether the transfer starts (`YES`) or is off (`NO`)."""
YES, NO = b"yes", b"no"
POLL_SECONDS = 0.02
LATE_SECONDS = 1.0
"""How long members that are on their way to a transfer that is off are still told so."""
JOIN_SECONDS = 5.0
"""How long torch tries to reach the rendezvous of a trainer that has just answered; it does so twice."""


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
        self._seconds = seconds

    def start(self, num_members: int, is_off: threading.Event) -> None:
        """Wait for this number of members beside the trainer, and let them start.

        Raises:
            TransferFailed: It was called off, or they did not come in time; those that did are told.
        """
        keys, until = [HERE % (1 + number) for number in range(num_members)], time.monotonic() + self._seconds
        while not (have_come := self.store.check(keys)) and time.monotonic() < until and not is_off.wait(POLL_SECONDS):
            pass
        self.store.set(START, YES if have_come else NO)
        if not have_come:
            time.sleep(LATE_SECONDS)
            why = "it was called off" if is_off.is_set() else f"not all workers came within {self._seconds:g} s"
            raise TransferFailed(f"the transfer did not start: {why}")


class Channel:
    """One member of a group that carries a version."""

    def __init__(self, store: Any, *, rank: int, size: int, address: str, seconds: float) -> None:
        self._rank, self._size = rank, size
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
            TransferFailed: The trainer does not answer, or calls it off, or the others do not come.
        """
        try:
            with socket.create_connection((host, port), seconds) as probe:
                address = str(probe.getsockname()[0])
            joining = timedelta(seconds=min(JOIN_SECONDS, seconds))
            store = _dist.TCPStore(host, port, is_master=False, timeout=joining)
            store.set_timeout(timedelta(seconds=seconds))
            store.set(HERE % rank, YES)
            is_on = bool(store.get(START) == YES)
        except (OSError, RuntimeError) as error:
            raise TransferFailed(f"the trainer at {host}:{port} does not answer: {error}") from error
        if not is_on:
            raise TransferFailed("it was called off, because not all of its engines take part")
        return cls(store, rank=rank, size=size, address=address, seconds=seconds)

    def broadcast(self, buffer: Tensor, chunk_bytes: int) -> None:
        """Send the buffer, or fill it with what the trainer sends, in chunks that all members agree on.

        No member sends more than two copies, however many there are: of each chunk the trainer sends each member one
        part, and all pass on what they get. This is a scatter and a ring's allgather (Chan and others 2007, "Collective
        communication: theory, practice, and experience").

        Raises:
            TransferFailed: A connection broke, or the time limit passed.
        """
        try:
            for start in range(0, len(buffer), chunk_bytes):
                chunk = buffer[start : start + chunk_bytes]
                if self._size == PAIR:
                    self._group.broadcast(chunk, SENDER).wait()
                else:
                    self._pass_on(chunk)
        except RuntimeError as error:
            raise TransferFailed(f"the transfer broke off: {_first_line(error)}") from error

    def _pass_on(self, chunk: Tensor) -> None:
        is_sender, options = self._rank == SENDER, _dist.ScatterOptions()
        options.rootRank = SENDER
        part = torch.empty(-(-len(chunk) // self._size), dtype=torch.uint8)
        whole = torch.zeros(self._size * len(part), dtype=torch.uint8)
        if is_sender:
            whole[: len(chunk)] = chunk
        self._group.scatter([part], [list(whole.view(self._size, -1).unbind())] if is_sender else [], options).wait()
        self._group._allgather_base(whole, part).wait()  # noqa: SLF001  its only name for one buffer
        if not is_sender:
            chunk.copy_(whole[: len(chunk)])

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
