"""What is known of a packed row before the forward pass, as tensors on the device: the model's inputs and the loss's.

The next row's tensors are made during a row's computation. The CPU builds masks and indices, and copies from pinned
memory do not wait for the GPU, so the GPU computes row after row without a gap. Legend: N tokens of a row, m trained
tokens of it, M of the batch, U distinct predictors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.batch.batch import Row
from trainer.batch.forest import Layout, block_mask, dense_mask
from trainer.batch.logits import Processing, RowLogits

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    """A packed row on the model's device, as R sequences: one, or a chain each where the model shares nothing."""

    tokens: Tensor
    """[R, N]; behind a chain that is shorter than the longest, padding that none of its tokens sees."""
    positions: Tensor
    """[R, N]; [3, R, N] in a model whose tokens may have three, where one has"""
    mask: Tensor | BlockMask | None
    """Who sees whom; None where causal attention is all that is needed."""
    keep: Tensor
    """Places whose logits are needed, of one sequence each once for each distribution. [U], of several [C]"""
    which: Tensor
    """The kept place that predicts each trained token. [m]"""
    target: Tensor
    temperature: Tensor
    """Of each kept place. [U]"""
    processing: Processing | None = None
    """What else is applied to the logits of the kept places; None: they are only scaled."""
    kept: Tensor | None = None
    """Which of the R · C logits are those of the U places; None for one sequence, where all of them are. [U]"""
    parts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the terms of features have for the row, by their names."""


def row_inputs(
    row: Row,
    temperature: Tensor,
    target: Tensor,
    processors: RowLogits | None,
    attention: str,
    device: torch.device,
    *,
    shares: bool = True,
) -> RowInputs:
    """Return a row's tensors; `temperature` and `target` are those of each trained token, [m].

    The name of the implementation of `attention` decides the kind of mask. Without `shares` the model cannot compute a
    forest as one sequence, so nothing is shared in the row.
    """
    layout, predictor, mask = row.layout, row.predictor, None
    lane, column, positions = np.zeros_like(layout.positions), np.arange(len(layout.tokens)), layout.positions
    is_in_lanes = not (shares or layout.is_one_sequence)
    if is_in_lanes:  # each chain is a sequence of its own
        column, lane = layout.positions, np.cumsum(layout.positions == 0) - 1
        positions = np.tile(np.arange(column.max() + 1), (lane[-1] + 1, 1))
    elif not layout.is_one_sequence:
        mask = _mask(layout, attention, device)

    def placed(values: npt.NDArray[np.int64], fill: int) -> Tensor:
        if not is_in_lanes:
            return on_device(torch.from_numpy(values[None]), device)
        grid = np.full((*positions.shape, *values.shape[1:]), fill, np.int64)
        grid[lane, column] = values
        return on_device(torch.from_numpy(grid), device)

    # Two branches may part after the same token: its logits are computed once for both, if they are scaled alike.
    places = [torch.from_numpy(of[predictor]) for of in (lane, column)]
    keyed = [*places, temperature, *(() if processors is None else [processors.key])]  # a processed token has its own
    columns = torch.stack([column.double() for column in keyed])
    distinct, which = torch.unique(columns, dim=1, return_inverse=True)
    keep, kept = distinct[1].long(), None
    if is_in_lanes:
        keep, of_columns = torch.unique(keep, return_inverse=True)
        kept = on_device(distinct[0].long() * len(keep) + of_columns, device)
    return RowInputs(
        tokens=placed(layout.tokens.astype(np.int64), 0),
        positions=on_device(torch.from_numpy(positions if is_in_lanes else positions[None]), device),
        mask=mask,
        keep=on_device(keep, device),
        which=on_device(which, device),
        target=on_device(target.long(), device),
        temperature=on_device(distinct[2].float(), device),
        processing=None if processors is None else processors.placed(which, lambda tensor: on_device(tensor, device)),
        kept=kept,
    )


def flat_places(layout: Layout, shape: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the place of each token of a row in its sequences of this shape, one behind the other. [N]."""
    num_sequences, width = shape
    column = layout.positions
    return np.arange(len(column)) if num_sequences == 1 else (np.cumsum(column == 0) - 1) * width + column


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy to a GPU is queued there, and nothing waits for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def ahead(items: Sequence[Item], prepare: Callable[[Item], Prepared]) -> Iterator[tuple[Item, Prepared]]:
    """Yield each item with what was prepared for it: by a thread, while the caller was busy with the one before."""
    if len(items) < 2:
        for item in items:
            yield item, prepare(item)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="rows") as thread:
        coming: Future[Prepared] = thread.submit(prepare, items[0])
        for number, item in enumerate(items):
            prepared = coming.result()
            if number + 1 < len(items):
                coming = thread.submit(prepare, items[number + 1])
            yield item, prepared


def _mask(layout: Layout, attention: str, device: torch.device) -> Tensor | BlockMask:
    if attention == "flex_attention":
        return block_mask(layout, device)
    seen = dense_mask(layout, device)[None, None]
    if attention == "eager":  # it adds its mask to the scores
        return torch.zeros(seen.shape, device=device).masked_fill_(~seen, torch.finfo(torch.float32).min)
    return seen
