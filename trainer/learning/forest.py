"""Token sequences as a forest: a prefix that several sequences share is laid out and computed once.

Sharing is decided by the token ids alone. A chain, its branches, and other rollouts of the same task are inserted into
one radix tree. The tree is laid out in preorder, so the descendants of a token are the places from its own to the end
of its subtree. **The rule of attention**: token q sees token k where k ≤ q < subtree_end[k], that is, itself and its
ancestors. A token's position is its depth, so every root-to-leaf path computes exactly what it would compute alone.
Legend: N tokens of a row, L tokens of one sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from turnwise.types import TokenIds

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(slots=True)
class _Segment:
    """A run of tokens without a branch."""

    tokens: TokenIds
    depth: int
    """Position of its first token."""
    children: dict[int, _Segment] = dataclasses.field(default_factory=dict)
    """By their first token."""
    start: int = -1
    """Place of its first token in the row, once laid out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A forest laid out as one row: a segment comes after all of its ancestors."""

    tokens: TokenIds
    """[N]"""
    positions: Indices
    """Depth of each token, as the model's position id. [N]"""
    subtree_end: Indices
    """Place behind the last descendant of each token: token q sees token k where k ≤ q < subtree_end[k]. [N]"""

    @property
    def is_one_sequence(self) -> bool:
        """Whether plain causal attention is all that is needed."""
        return bool((self.subtree_end == len(self.tokens)).all())


class Forest:
    """A radix tree over token sequences, with any number of roots."""

    def __init__(self) -> None:
        self._top = _Segment(np.empty(0, np.int32), 0)
        self.num_tokens = 0
        """Tokens in all segments: what a row of it costs."""

    def insert(self, tokens: TokenIds) -> None:
        """Add a sequence; tokens that it has in common with the beginning of another cost nothing."""
        segment, done = self._top, 0
        while done < len(tokens):
            child = segment.children.get(int(tokens[done]))
            if child is None:
                segment.children[int(tokens[done])] = _Segment(tokens[done:], done)
                self.num_tokens += len(tokens) - done
                return
            shared = _common_prefix(child.tokens, tokens[done:])
            if shared < len(child.tokens):
                _split(child, shared)
            segment, done = child, done + shared

    def num_new_tokens(self, tokens: TokenIds) -> int:
        """Return how many tokens `insert` would add."""
        segment, done = self._top, 0
        while done < len(tokens):
            child = segment.children.get(int(tokens[done]))
            if child is None:
                break
            shared = _common_prefix(child.tokens, tokens[done:])
            done += shared
            if shared < len(child.tokens):
                break
            segment = child
        return len(tokens) - done

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

    def places(self, tokens: TokenIds) -> Indices:
        """Return where in the row each token of an inserted sequence lies. [L]."""
        return np.concatenate(list(self._walk(tokens)))

    def _walk(self, tokens: TokenIds) -> Iterator[Indices]:
        segment, done = self._top, 0
        while done < len(tokens):
            segment = segment.children[int(tokens[done])]
            length = min(len(segment.tokens), len(tokens) - done)
            yield segment.start + np.arange(length)
            done += length


def _common_prefix(left: TokenIds, right: TokenIds) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _split(segment: _Segment, length: int) -> None:
    """Cut a segment in two; the second half takes over the children."""
    tail = _Segment(segment.tokens[length:], segment.depth + length, segment.children)
    segment.tokens = segment.tokens[:length]
    segment.children = {int(tail.tokens[0]): tail}
