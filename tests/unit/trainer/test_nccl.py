"""Calls of NCCL's library, against functions with the signatures of its header `nccl.h`.

Each function is called by its address, so arguments arrive as a C compiler would read them.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.publish import nccl

IDENTITY = bytes(range(128))
COMMUNICATOR, STREAM = 0x7F00_0000_1000, 0x7F00_0000_2000
"""Pointers that do not fit into 32 bits."""
INVALID_ARGUMENT = 4
"""`ncclInvalidArgument`."""


class UniqueId(ctypes.Structure):
    """`typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_char * 128)]


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (c_int, ctypes.POINTER(UniqueId)),
    "ncclCommInitRank": (c_int, ctypes.POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclAllReduce": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_int, c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclCommAbort": (c_int, c_void_p),
    "ncclGetErrorString": (c_char_p, c_int),
}
"""Result and arguments."""


class Library:
    """Stands in for `libnccl.so.2`, and keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.statuses: dict[str, int] = {}
        self.message = ctypes.create_string_buffer(b"invalid argument")
        self._made = {name: self._make(name, types) for name, types in SIGNATURES.items()}

    def _make(self, name: str, types: tuple[Any, ...]) -> Any:
        result, *arguments = types

        def called(*given: Any) -> int:
            self.calls.append((name, *self._read(name, given)))
            if name == "ncclGetErrorString":
                return ctypes.addressof(self.message)
            return self.statuses.get(name, 0)

        return ctypes.CFUNCTYPE(c_void_p if result is c_char_p else result, *arguments)(called)

    @staticmethod
    def _read(name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "ncclGetUniqueId":
            ctypes.memmove(given[0], IDENTITY, len(IDENTITY))
            return ()
        if name == "ncclCommInitRank":
            given[0][0] = COMMUNICATOR
            return given[1], bytes(given[2]), given[3]
        return given

    def __getattr__(self, name: str) -> Any:
        """Return a function of which nothing is known but its address, as of a library."""
        return ctypes.CDLL(None)._FuncPtr(ctypes.cast(self._made[name], c_void_p).value)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """NCCL and a GPU that are not there."""
    found = Library()
    load: Callable[..., Any] = ctypes.CDLL
    stream = SimpleNamespace(cuda_stream=STREAM, query=lambda: True, synchronize=lambda: None)
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: found if name == nccl.LIBRARY else load(name))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return found


def test_the_calls_have_the_arguments_of_nccls_header(library: Library):
    """float32 is 7, uint8 is 1, a sum is 0; a count of 5 · 2^32 bytes is no C int."""
    group = nccl.Group(nccl.new_unique_id(), 3, torch.device("cpu"))
    start = group._one.data_ptr()
    assert library.calls == [
        ("ncclGetUniqueId",),
        ("ncclCommInitRank", 3, IDENTITY, 0),
        ("ncclAllReduce", start, start, 1, 7, 0, COMMUNICATOR, STREAM),
    ]
    payload = torch.zeros(1, dtype=torch.uint8).expand(5 * 2**32)
    group.broadcast(payload)
    place = payload.data_ptr()
    assert library.calls[3] == ("ncclBroadcast", place, place, 5 * 2**32, 1, 0, COMMUNICATOR, STREAM)
    assert group.is_done()
    group.abort()
    assert library.calls[4:] == [("ncclCommAbort", COMMUNICATOR)]


def test_an_error_names_the_call_and_leaves_the_group(library: Library):
    library.statuses = {"ncclAllReduce": INVALID_ARGUMENT}
    with pytest.raises(nccl.NcclFailed, match="ncclAllReduce failed: invalid argument"):
        nccl.Group(IDENTITY, 2, torch.device("cpu"))
    assert library.calls[-2:] == [("ncclGetErrorString", INVALID_ARGUMENT), ("ncclCommAbort", COMMUNICATOR)]


def test_without_nccl_the_error_names_the_missing_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-that-is-not-there.so")
    with pytest.raises(nccl.NcclFailed, match="cannot be loaded"):
        nccl.new_unique_id()
