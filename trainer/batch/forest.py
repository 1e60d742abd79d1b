"""Token sequences as a forest, in which a shared prefix is computed once in a row, and the masks of its attention.

Sharing is decided by the tokens alone. A chain, its branches, and other rollouts of the same task are inserted into
one radix tree. The tree is laid out in preorder, so the descendants of a token are the places from its own to the end
of its subtree. **The rule of attention**: token q sees token k where k ≤ q < subtree_end[k], that is, itself and its
ancestors. A token's position is its depth, so every root-to-leaf path computes exactly what it would compute alone.

FlexAttention (GPU) gets the rule block by block, so blocks without a visible pair cost nothing. SDPA (CPU, where
FlexAttention has no backward) gets it as a dense mask, of which only the visible blocks are written. Legend: N tokens
of a row, B blocks of a row, L tokens of one sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

Indices = npt.NDArray[np.int64]
Keys = npt.NDArray[np.integer[Any]]
"""Tokens as they are compared: ids, and other numbers where two tokens of one id differ."""
BLOCK = 128


@dataclasses.dataclass(slots=True)
class _Segment:
    tokens: Keys
    depth: int
    children: dict[int, _Segment] = dataclasses.field(default_factory=dict)
    start: int = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A forest laid out as one row: a segment comes after all of its ancestors."""

    tokens: Keys
    """[N]"""
    positions: Indices
    """Depth of each token, as the model's position id. [N]"""
    subtree_end: Indices
    """Place behind the last descendant of each token: token q sees token k where k ≤ q < subtree_end[k]. [N]"""

    @property
    def is_one_sequence(self) -> bool:
        return bool((self.subtree_end == len(self.tokens)).all())


class Forest:
    """A radix tree over token sequences, with any number of roots."""

    def __init__(self) -> None:
        self._top = _Segment(np.empty(0, np.int32), 0)
        self.num_tokens = 0

    def insert(self, tokens: Keys) -> None:
        """Add a sequence; tokens that it has in common with the beginning of another cost nothing."""
        segment, shared, done = self._shared(tokens)
        if shared < len(segment.tokens):
            tail = _Segment(segment.tokens[shared:], segment.depth + shared, segment.children)
            segment.tokens, segment.children = segment.tokens[:shared], {int(tail.tokens[0]): tail}
        if done < len(tokens):
            segment.children[int(tokens[done])] = _Segment(tokens[done:], done)
            self.num_tokens += len(tokens) - done

    def num_new_tokens(self, tokens: Keys) -> int:
        return len(tokens) - self._shared(tokens)[2]

    def _shared(self, tokens: Keys) -> tuple[_Segment, int, int]:
        """Return the segment in which a sequence leaves the tree, and the tokens in common with it, and in all."""
        segment, shared, done = self._top, 0, 0
        while done < len(tokens) and shared == len(segment.tokens):
            child = segment.children.get(int(tokens[done]))
            if child is None:
                break
            length = min(len(child.tokens), len(tokens) - done)
            different = np.flatnonzero(child.tokens[:length] != tokens[done : done + length])
            segment, shared = child, int(different[0]) if len(different) else length
            done += shared
        return segment, shared, done

    def lay_out(self) -> Layout:
        """Return the forest as one row and remember where each segment lies. Nothing may be inserted afterwards."""
        segments: list[_Segment] = []
        parents: list[int] = []
        start = 0
        pending = [(child, -1) for child in reversed(self._top.children.values())]
        while pending:
            segment, parent = pending.pop()
            segment.start = start
            start += len(segment.tokens)
            pending.extend((child, len(segments)) for child in reversed(segment.children.values()))
            segments.append(segment)
            parents.append(parent)
        lengths = [len(segment.tokens) for segment in segments]
        ends = np.cumsum(lengths)
        # In preorder a segment's descendants follow it, so each parent's end is that of its last descendant.
        for index in range(len(segments) - 1, -1, -1):
            if parents[index] >= 0:
                ends[parents[index]] = max(ends[parents[index]], ends[index])
        return Layout(
            tokens=np.concatenate([segment.tokens for segment in segments]),
            positions=np.concatenate([segment.depth + np.arange(len(segment.tokens)) for segment in segments]),
            subtree_end=np.repeat(ends, lengths),
        )

    def places(self, tokens: Keys) -> Indices:
        segment, done = self._top, 0
        found: list[Indices] = []
        while done < len(tokens):
            segment = segment.children[int(tokens[done])]
            length = min(len(segment.tokens), len(tokens) - done)
            found.append(segment.start + np.arange(length))
            done += length
        return np.concatenate(found)


def side_by_side(sequences: Sequence[Keys]) -> tuple[Layout, list[Indices]]:
    lengths = [len(tokens) for tokens in sequences]
    ends = np.cumsum(lengths)
    layout = Layout(
        tokens=np.concatenate(sequences),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        subtree_end=np.repeat(ends, lengths),
    )
    return layout, [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


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

    first, last = _extremes(np.arange(length))
    first_end, last_end = _extremes(layout.subtree_end)
    some = (first[None, :] <= last[:, None]) & (first[:, None] < last_end[None, :])
    whole = (last[None, :] < first[:, None]) & (last[:, None] < first_end[None, :])
    lists = *_as_lists(some & ~whole, device), *_as_lists(whole, device)
    return BlockMask.from_kv_blocks(*lists, BLOCK, sees, seq_lengths=(length, length))


def _extremes(values: Indices) -> tuple[Indices, Indices]:
    starts = np.arange(0, len(values), BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _as_lists(seen: npt.NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how many blocks each query block sees, [1, 1, B], and their numbers before the others, [1, 1, B, B]."""
    counts = torch.from_numpy(seen.sum(1).astype(np.int32))
    numbers = torch.from_numpy(np.argsort(~seen, axis=1, kind="stable").astype(np.int32))
    return counts[None, None].to(device), numbers[None, None].to(device)
