"""Attention over a packed row: the forest's rule as the masks that the kernels take.

`trainer.learning.forest` states the rule: token q sees token k where k ≤ q < subtree_end[k]. FlexAttention (GPU) gets
it block by block, so blocks without a visible pair cost nothing. SDPA (CPU, where FlexAttention has no backward) gets
it as a dense mask, of which only the visible blocks are written. Legend: N tokens of a row, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.learning.forest import Indices, Layout

Marks = npt.NDArray[np.bool_]
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of batch, head, query and key: whether the query sees the key."""
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

    places = np.arange(length)
    some, whole = blocks_of(places, places, layout.subtree_end)
    return mask_of_blocks(some, whole, sees, (length, length), device)


def mask_of_blocks(
    some: npt.NDArray[np.bool_],
    whole: npt.NDArray[np.bool_],
    sees: Rule,
    lengths: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    """Return the mask of a rule, from what `blocks_of` returned, for so many queries and keys."""
    partial_count, partial_index = _as_lists(some & ~whole, device)
    whole_count, whole_index = _as_lists(whole, device)
    return BlockMask.from_kv_blocks(
        partial_count, partial_index, whole_count, whole_index, BLOCK, sees, seq_lengths=lengths
    )


def blocks_of(query: Indices, key: Indices, end: Indices) -> tuple[Marks, Marks]:
    """Return which key blocks each query block may see some token of, and which it sees whole; both [B, B'].

    Args:
        query: Place in the row of each query.
        key: Place in the row of each key; -1 for padding.
        end: End of each key's subtree; -1 for padding.
    """
    first_query, last_query = _extremes(query)
    first_key, last_key = _extremes(key)
    first_end, last_end = _extremes(end)
    some = (first_key[None, :] <= last_query[:, None]) & (first_query[:, None] < last_end[None, :])
    whole = (last_key[None, :] < first_query[:, None]) & (last_query[:, None] < first_end[None, :])
    return some, whole


def _extremes(values: Indices) -> tuple[Indices, Indices]:
    """Return the least and the largest value of each block."""
    starts = np.arange(0, len(values), BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _as_lists(seen: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each query block sees, [1, 1, B], and their numbers before the others, [1, 1, B, B]."""
    counts = torch.from_numpy(seen.sum(1).astype(np.int32))
    numbers = torch.from_numpy(np.argsort(~seen, axis=1, kind="stable").astype(np.int32))
    return counts[None, None].to(device), numbers[None, None].to(device)
