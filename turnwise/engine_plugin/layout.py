"""One buffer of bytes for all tensors of a version, and where each tensor lies in it.

Every transfer moves parts of this buffer, so the checksum of the buffer shows that a version arrived whole, whichever
way it came. Tensors are aligned to 16 bytes; the bytes between them are zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; a multiple of 8, so that the buffer is a whole number of 64-bit words."""
BLOCK_WORDS = 1 << 20
"""64-bit words that the checksum multiplies at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor."""

    name: str
    """Name in the checkpoint."""
    dtype: str
    """Name of the torch dtype, such as `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """First byte."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


class Layout:
    """The places of all tensors of a version."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        ends = [slot.offset + slot.num_bytes for slot in self.slots]
        self.num_bytes = _aligned(max(ends, default=0))

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Return the layout of these tensors, in their order."""
        slots, offset = [], 0
        for name, tensor in tensors.items():
            slot = Slot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
            slots.append(slot)
            offset = _aligned(offset + slot.num_bytes)
        return cls(slots)

    def as_json(self) -> list[list[Any]]:
        """Return the tensors as JSON values; the offsets follow from them."""
        return [[slot.name, slot.dtype, list(slot.shape)] for slot in self.slots]

    @classmethod
    def from_json(cls, found: Sequence[Sequence[Any]]) -> Self:
        """Return the layout that `as_json` described.

        Raises:
            ValueError: It is not a description of tensors.
        """
        slots, offset = [], 0
        for name, dtype, shape in found:
            slot = Slot(str(name), str(dtype), tuple(int(size) for size in shape), offset)
            slots.append(slot)
            offset = _aligned(offset + slot.num_bytes)
        return cls(slots)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new buffer with these tensors. [num_bytes], uint8."""
        buffer = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for name, view in self.views(buffer):
            view.copy_(tensors[name])
        return buffer

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor as a view of the buffer, in order."""
        for slot in self.slots:
            flat = buffer[slot.offset : slot.offset + slot.num_bytes].view(torch_dtype(slot.dtype))
            yield slot.name, flat.view(slot.shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ValueError: There is no such dtype.
    """
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


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
