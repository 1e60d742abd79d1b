"""Attention over a packed row: the forest's rule as the masks that the kernels take.

`trainer.learning.forest` states the rule: token q sees token k where k ≤ q < subtree_end[k]. FlexAttention (GPU) gets
it block by block, so blocks that nobody sees cost nothing. SDPA (CPU, where FlexAttention has no backward) gets it as a
dense mask, of which only the visible blocks are written. Legend: N tokens of a row, B blocks of a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.learning.forest import Layout

BLOCK = 128
"""Tokens of a block of FlexAttention."""


def dense_mask(layout: Layout, device: torch.device) -> Tensor:
    """Return who sees whom, True where row token i sees row token j. [N, N]."""
    end = layout.subtree_end
    length = len(end)
    starts = np.flatnonzero(np.diff(end, prepend=-1)).tolist()
    mask = torch.zeros((length, length), dtype=torch.bool, device=device)
    # Tokens of one run end together: they see each other causally, and what follows in their subtree sees all of them.
    for start, stop in zip(starts, [*starts[1:], length], strict=True):
        mask[start:stop, start:stop] = torch.ones((stop - start,) * 2, dtype=torch.bool, device=device).tril_()
        mask[stop : end[start], start:stop] = True
    return mask


def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    """Return the same rule for FlexAttention.

    A key block is left out where it lies behind the query block, or where all of its subtrees end before the query
    block begins. It is whole where it lies before the query block and no subtree ends inside that. Between the two,
    the kernel applies the rule token by token.
    """
    length = len(layout.tokens)
    padded = -(-length // BLOCK) * BLOCK
    end = torch.from_numpy(np.pad(layout.subtree_end, (0, padded - length))).to(device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    some, whole = _blocks(layout.subtree_end)
    partial_count, partial_index = _as_lists(some & ~whole, device)
    whole_count, whole_index = _as_lists(whole, device)
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, whole_count, whole_index, BLOCK, sees, seq_lengths=(length, length)
    )


def _blocks(end: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which key blocks each query block sees some token of, and which it sees whole; both [B, B]."""
    length = len(end)
    starts = np.arange(0, length, BLOCK)
    stops = np.minimum(starts + BLOCK, length)
    latest, earliest = np.maximum.reduceat(end, starts), np.minimum.reduceat(end, starts)
    number = np.arange(len(starts))
    some = (number[None, :] <= number[:, None]) & (starts[:, None] < latest[None, :])
    whole = (number[None, :] < number[:, None]) & (stops[:, None] <= earliest[None, :])
    return some, whole


def _as_lists(seen: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each query block sees, [1, 1, B], and their numbers before the others, [1, 1, B, B]."""
    counts = torch.from_numpy(seen.sum(1).astype(np.int32))
    numbers = torch.from_numpy(np.argsort(~seen, axis=1, kind="stable").astype(np.int32))
    return counts[None, None].to(device), numbers[None, None].to(device)
