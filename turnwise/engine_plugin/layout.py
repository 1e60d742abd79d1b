"""One buffer of bytes for all tensors of a version, and where each tensor lies in it.

Every transfer moves parts of this buffer, so the checksum of the buffer shows that a version arrived whole, whichever
way it came. Tensors are aligned to 16 bytes; the bytes between them are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
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
