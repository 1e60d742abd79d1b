"""The difference of two buffers: the places of the 16-bit words that differ, and their new values.

An optimizer step at a small learning rate changes few bits of bfloat16 weights, so the difference is a small part of
the whole. It is exact: applied to the old buffer it gives the new one bit for bit. A place is written as the distance
from the place before it, in one or two bytes; a larger distance is bridged by words that are written unchanged.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK_WORDS = 1 << 24
"""Words that are compared at once, which bounds the memory of a comparison."""

Words = npt.NDArray[np.uint16]
Distances = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What changes one buffer into another."""

    distances: Distances
    """From each written word to the next one; the first counts from the place before the buffer. [C]"""
    values: Words
    """The written words. [C]"""

    @property
    def num_bytes(self) -> int:
        """Size of the encoded form."""
        return self.distances.nbytes + self.values.nbytes

    def encode(self) -> Tensor:
        """Return the delta as bytes: the values, then the distances. [num_bytes]."""
        joined = np.concatenate([self.values.view(np.uint8), self.distances.view(np.uint8)])
        return torch.from_numpy(joined)


def decode(encoded: Tensor, num_words: int) -> Delta:
    """Return the delta of its encoded form with this many written words.

    Raises:
        ValueError: The size does not fit the number of words.
    """
    raw = encoded.numpy()
    width = 0 if num_words == 0 else (len(raw) - 2 * num_words) / num_words
    if width not in (0, 1, 2):
        raise ValueError(f"a delta of {num_words} words cannot have {len(raw)} bytes")
    kind = np.dtype(np.uint8 if width == 1 else np.uint16)
    return Delta(raw[2 * num_words :].view(kind), raw[: 2 * num_words].view(np.uint16))


def difference(old: Tensor, new: Tensor) -> Delta:
    """Return what changes `old` into `new`, in the smaller of the two widths."""
    before, after = _words(old), _words(new)
    places = np.concatenate(
        [
            np.flatnonzero(before[start : start + BLOCK_WORDS] != after[start : start + BLOCK_WORDS]) + start
            for start in range(0, len(after), BLOCK_WORDS)
        ]
        or [np.empty(0, np.int64)]
    )
    return min(_bridged(places, after, np.uint8), _bridged(places, after, np.uint16), key=lambda delta: delta.num_bytes)


def apply(delta: Delta, buffer: Tensor) -> None:
    """Change a buffer in place.

    Raises:
        ValueError: A place lies outside the buffer.
    """
    words = _words(buffer)
    places = np.cumsum(delta.distances, dtype=np.int64) - 1
    if len(places) and places[-1] >= len(words):
        raise ValueError(f"the delta writes word {places[-1]} of a buffer of {len(words)} words")
    words[places] = delta.values


def _bridged(places: npt.NDArray[np.int64], after: Words, kind: type[np.uint8 | np.uint16]) -> Delta:
    """Return the delta with words in between wherever a distance exceeds its type."""
    longest = int(np.iinfo(kind).max)
    distances = np.diff(places, prepend=-1)
    num_steps = -(-distances // longest)
    last = np.cumsum(num_steps) - 1
    written = np.full(int(num_steps.sum()), longest, np.int64)
    written[last] = distances - (num_steps - 1) * longest
    return Delta(cast("Distances", written.astype(kind)), after[np.cumsum(written) - 1])


def _words(buffer: Tensor) -> Words:
    words: Words = buffer.numpy().view(np.uint16)
    return words
