"""A group of NCCL between the trainer, as rank 0, and the workers of one engine, through NCCL's own library.

vLLM's backend `nccl` accepts a unique id in place of a store, so the trainer needs no vLLM. torch's process groups
cannot start from a unique id, and they end the whole process when a peer stays away; this group is aborted instead. The
library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
UINT8, FLOAT32 = 1, 7
"""Values of `ncclDataType_t`."""
SUM = 0
"""Value of `ncclRedOp_t`."""
SENDER = 0
"""Rank of the trainer."""


class NcclFailed(Exception):
    """A call of NCCL that did not succeed; the message says which one and why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


def new_unique_id() -> bytes:
    """Return an id under which the members of one group find one another.

    Raises:
        NcclFailed: There is no NCCL.
    """
    found = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(found))
    return bytes(found)


class Group:
    """One member, rank 0, of a group with the workers of an engine."""

    def __init__(self, unique_id: bytes, size: int, device: torch.device) -> None:
        """Join the group; blocks until all workers have joined. `is_done` says when its first sum is complete.

        Raises:
            NcclFailed: They cannot connect.
        """
        self._communicator = ctypes.c_void_p()
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            joined = ctypes.byref(self._communicator)
            _call("ncclCommInitRank", joined, size, _UniqueId.from_buffer_copy(unique_id), SENDER)
            self._one = torch.zeros(1, device=device)  # each worker of vLLM starts with this sum
            torch.cuda.current_stream().synchronize()
        try:
            self._start_sum(self._one)
        except NcclFailed:
            self.abort()
            raise

    def broadcast(self, payload: Tensor) -> None:
        """Start to send bytes that are on the device already.

        Raises:
            NcclFailed: It cannot be started.
        """
        place = _at(payload)
        with torch.cuda.device(self._device):  # each thread has its own current device
            _call("ncclBroadcast", place, place, _count(payload), UINT8, SENDER, self._communicator, self._handle)

    def is_done(self) -> bool:
        """Return whether all that was started has been sent."""
        return bool(self._stream.query())

    def abort(self) -> None:
        """Stop what is running, and leave the group; once only, since the communicator is gone afterwards."""
        with torch.cuda.device(self._device):
            _call("ncclCommAbort", self._communicator)

    def _start_sum(self, one: Tensor) -> None:
        place = _at(one)
        with torch.cuda.device(self._device):
            _call("ncclAllReduce", place, place, _count(one), FLOAT32, SUM, self._communicator, self._handle)

    @property
    def _handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _count(tensor: Tensor) -> ctypes.c_size_t:
    return ctypes.c_size_t(tensor.numel())


def _call(name: str, *arguments: object) -> None:
    """Call the library; int arguments are C ints.

    Raises:
        NcclFailed: There is no library, or it returned an error.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NcclFailed(f"{LIBRARY} cannot be loaded: {error}; a torch for CUDA brings it") from error
    status = getattr(library, name)(*arguments)
    if status:
        describe = library.ncclGetErrorString
        describe.restype = ctypes.c_char_p
        raise NcclFailed(f"{name} failed: {describe(status).decode()}")
