"""The support of sampled tokens: the ids that top-k, top-p and min-p left to sample from, as a turn stores them.

Behaviour logprobs are normalised over the support, so a trainer needs it to compute the distribution that sampled. It
is stored as its counts and the differences of its sorted ids, byte plane by byte plane and compressed: about two bytes
an id at a vocabulary of 150,000.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from turnwise.types import TokenIds

Support: TypeAlias = Sequence[TokenIds | None]
"""The sorted ids that could be sampled at each token; None where they are not known."""
TRUNCATING: Mapping[str, Callable[[Any], bool]] = {
    "top_p": lambda value: value < 1,
    "top_k": lambda value: value > 0,
    "min_p": lambda value: value > 0,
}
"""Sampling parameters that leave a part of the vocabulary, which depends on the engine's own logits, and when."""
_UINT32 = np.dtype("<u4")


def pack(support: Sequence[Sequence[int] | TokenIds | None]) -> bytes:
    """Return the stored form of the ids that could be sampled at each token."""
    known = [sorted(ids) for ids in support if ids is not None]
    ids = np.fromiter(itertools.chain.from_iterable(known), np.int64)
    sizes = np.fromiter(map(len, known), np.int64, len(known))
    differences = np.diff(ids, prepend=0)
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    differences[starts] = ids[starts]
    counts = [0 if ids is None else len(ids) + 1 for ids in support]
    values = np.concatenate([[len(counts)], counts, differences]).astype(_UINT32)
    return zlib.compress(values.view(np.uint8).reshape(-1, _UINT32.itemsize).T.tobytes(), level=1)


def unpack(packed: bytes) -> list[TokenIds | None]:
    """Return the ids that could be sampled at each token, as `pack` got them.

    Raises:
        ValueError: it is not what `pack` has written.
    """
    try:
        planes = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(_UINT32.itemsize, -1)
    except zlib.error as error:
        raise ValueError(f"the stored support cannot be read: {error}") from error
    values = np.ascontiguousarray(planes.T).view(_UINT32).ravel().astype(np.int64)
    length = int(values[0]) if values.size else 0
    counts, differences = values[1 : length + 1], values[length + 1 :]
    ends = np.cumsum(np.maximum(counts - 1, 0))
    if not values.size or counts.size != length or (int(ends[-1]) if length else 0) != differences.size:
        raise ValueError("the stored support cannot be read: it ends early")
    sums = np.concatenate([[0], np.cumsum(differences)])
    found: list[TokenIds | None] = []
    for count, end in zip(counts.tolist(), ends.tolist(), strict=True):
        start = end - count + 1
        found.append((sums[start + 1 : end + 1] - sums[start]).astype(np.int32) if count else None)
    return found


def support_json(support: Support | bytes | None) -> list[list[int] | None] | None:
    found = unpack(support) if isinstance(support, bytes) else support
    return None if found is None else [None if ids is None else ids.tolist() for ids in found]
