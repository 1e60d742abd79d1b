"""How the processes of one trainer divide the model and a row: replicas, shards, tensor and context parallelism.

The device mesh has one dimension each for replicas (HSDP), for shards (FSDP2) and for parts of layers (tensor
parallelism). The processes of one context are neighbours in the dimension of shards: they hold different shards and
different tokens of one row, and FSDP2 adds up their gradients as it does for different rows.

In a context each process computes consecutive tokens of the row. In every layer the keys and values of all processes
are gathered, and the forest's rule says which of them a query sees, so any forest works and the kernels stay those of
one process. PyTorch's ring attention supports plain causal attention only. The parts have similar costs: a token costs
more the deeper it lies. Legend: N tokens of a row, C of them in a process, padded to the longest part L; P processes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask

from trainer.batch.forest import BLOCK, Indices, Layout, mask_of_blocks
from trainer.model.loading import base_of
from trainer.parallel import context_group
from turnwise.errors import SettingsError

Attend = Callable[..., tuple[Tensor, Tensor | None]]
ATTENTION = "turnwise_context"
"""Name under which transformers finds the attention; `_flex` is added for FlexAttention."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContextGroup:
    """The processes that compute one row together."""

    group: Any
    rank: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowPart:
    """The part of a row that one process computes."""

    group: ContextGroup
    bounds: Indices
    """Where the parts begin, and where the last one ends. [P + 1]"""
    subtree_end: Indices

    @property
    def start(self) -> int:
        return int(self.bounds[self.group.rank])

    @property
    def stop(self) -> int:
        return int(self.bounds[self.group.rank + 1])

    @property
    def length(self) -> int:
        return int(np.diff(self.bounds).max())

    def padded(self, values: Indices, fill: int) -> Indices:
        padded = np.full((self.length, *values.shape[1:]), fill, np.int64)
        padded[: self.stop - self.start] = values[self.start : self.stop]
        return padded

    def own_places(self) -> Indices:
        """Return the place of each padded query in the row; behind the part, that of its last token. [L]."""
        places: Indices = np.minimum(self.start + np.arange(self.length), max(self.stop - 1, 0))
        return places

    def gathered_places(self) -> Indices:
        """Return the place of each gathered key in the row, -1 for padding. [P · L]."""
        places = self.bounds[:-1, None] + np.arange(self.length)
        gathered: Indices = np.where(places < self.bounds[1:, None], places, -1).reshape(-1)
        return gathered

    def mask(self, attention: str, device: torch.device) -> Tensor | BlockMask:
        query, key = self.own_places(), self.gathered_places()
        end = np.where(key >= 0, self.subtree_end[key], -1)
        if attention.endswith("_flex"):
            return _block_mask(query, key, end, device)
        query_L, key_K, end_K = (torch.from_numpy(each).to(device) for each in (query, key, end))
        return ((key_K <= query_L[:, None]) & (query_L[:, None] < end_K))[None, None]


def part_of(layout: Layout, group: ContextGroup, cost_of_depth: float) -> RowPart:
    """Return this process's part of a row.

    `cost_of_depth` is what a token's attention to one ancestor costs, where the rest of a token costs 1.
    """
    cost = np.cumsum(1.0 + cost_of_depth * layout.positions)
    shares = cost[-1] * np.arange(1, group.size) / group.size
    bounds = np.concatenate([[0], np.searchsorted(cost, shares) + 1, [len(cost)]])
    return RowPart(group, np.minimum(np.maximum.accumulate(bounds), len(cost)), layout.subtree_end)


def register_attention(group: ContextGroup, implementation: str) -> str:
    from transformers import AttentionInterface

    name = ATTENTION + ("_flex" if implementation == "flex_attention" else "")
    known = AttentionInterface()
    AttentionInterface.register(name, functools.partial(_attend, group, known[implementation], known["sdpa"]))
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """The trained tokens of a row that one process of a context computes."""

    index: Tensor
    """[m]"""
    count: int
    group: ContextGroup


def spread(values: Tensor, share: Share) -> Tensor:
    """Return the values of all processes' trained tokens. [m] to [count].

    Each process computes the same loss from all of them, so the backward pass keeps only the gradients of its own
    tokens.
    """
    return cast("Tensor", _Spread.apply(values, share.index, share.count, share.group.group))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(index)
        full = values.new_zeros(count)
        full[index] = values
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return gradient[index], None, None, None


class _Gather(torch.autograd.Function):
    """All processes' keys or values, one behind the other; the gradients are summed over the queries of all."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        gathered = own.new_empty(size, *own.shape)
        dist.all_gather_into_tensor(gathered, own.contiguous()[None], group=group)
        return torch.cat(list(gathered), dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts = torch.stack(gradient.chunk(ctx.size, dim=2)).contiguous()
        own = torch.empty_like(parts[:1])
        dist.reduce_scatter_tensor(own, parts, group=ctx.group)
        return own[0], None, None


def _attend(
    group: ContextGroup,
    attend: Attend,
    attend_causally: Attend,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the keys of all processes; without a mask, to its own: each process has a whole text.

    FlexAttention without a mask is not causal, and transformers makes no mask for an attention that it does not know.
    """
    if attention_mask is None:
        return attend_causally(module, query, key, value, None, **options)
    key, value = (_Gather.apply(each, group.group, group.size) for each in (key, value))  # type: ignore[no-untyped-call]
    return attend(module, query, key, value, attention_mask, **options)


def _block_mask(query: Indices, key: Indices, end: Indices, device: torch.device) -> BlockMask:
    def padded(values: Indices) -> Tensor:
        return torch.from_numpy(np.pad(values, (0, -len(values) % BLOCK), constant_values=-1)).to(device)

    place_of_query, place_of_key, end_of_key = padded(query), padded(key), padded(end)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        place = place_of_query[q]
        return (place_of_key[k] <= place) & (place < end_of_key[k])

    return mask_of_blocks(query, key, end, sees, device)


REPLICA, TENSOR = "replica", "tensor"
LAYERS = ".layers."
"""Part of the names of what is divided; embeddings and output layer, which may be tied, are replicated."""
NORM_OF_HEADS = "replicated_with_grad_allreduce"
STYLES = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    NORM_OF_HEADS,
    "grouped_gemm",
    "ep_dispatch_experts",
}
"""The styles of transformers' plans whose results equal those of one process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Division:
    """Numbers of processes along each dimension."""

    replicas: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def row_group(self) -> int:
        return self.tensor * self.context

    def check(self, size: int) -> None:
        """Check that this number of processes can be divided in this way.

        Raises:
            SettingsError: It cannot.
        """
        if size % (self.replicas * self.row_group):
            raise SettingsError(
                f"{size} processes cannot be divided by replicas={self.replicas}, tensor_parallel={self.tensor} and "
                f"context_parallel={self.context}: their product must divide the number of processes"
            )

    def mesh(self, device: torch.device, axis: str) -> DeviceMesh:
        """Return the mesh of all processes; `axis` names the dimension of shards."""
        size = dist.get_world_size()
        self.check(size)
        shape = (self.replicas, size // (self.replicas * self.tensor), self.tensor)
        return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICA, axis, TENSOR))

    def context_group(self) -> ContextGroup | None:
        """Return this process's context; None where each process computes its own rows."""
        if self.context == 1:
            return None
        rank = dist.get_rank() // self.tensor % self.context
        return ContextGroup(context_group(self.tensor, self.context), rank, self.context)


def check_divisible(config: Any, tensor: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_experts"):
        number = getattr(config, name, None)  # configurations of models with and without experts may say None
        if number is not None and number % tensor:
            raise SettingsError(
                f"tensor_parallel={tensor} does not divide the model's {name}={number}: choose a divisor of it"
            )


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide linear layers and experts over the mesh as transformers plans it, and replicate all other weights."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
    from transformers.distributed.tensor_parallel import (
        apply_expert_parallelism,
        apply_tensor_parallelism,
        replace_layer_number_by_wildcard,
    )

    whole = base_of(model)
    experts = {name: style for name, style in whole.ep_plan.items() if LAYERS in name}
    plan = {name: style for name, style in whole.tp_plan.items() if LAYERS in name and name not in experts}
    unknown = {*plan.values(), *experts.values()} - STYLES
    if unknown or not plan:
        reason = f"a plan with {min(unknown)!r}, which is not tested" if unknown else "no plan"
        raise SettingsError(
            f"tensor_parallel does not know how to divide {type(whole).__name__}: transformers has {reason}. Set "
            "tensor_parallel=1, which shards any model"
        )
    norms = {name for name, style in plan.items() if style == NORM_OF_HEADS}
    apply_tensor_parallelism(whole, mesh, {name: style for name, style in plan.items() if name not in norms})
    apply_expert_parallelism(whole, mesh, mesh, experts)
    # transformers adds up the gradient of such a norm in a hook that does not see the gradients of FSDP2. With an input
    # that counts as divided, in whichever dimension, the gradient of a replicated weight is a sum over the processes.
    for name, module in whole.named_modules():
        if replace_layer_number_by_wildcard(name) in norms:
            parallelize_module(module, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    _replicate_the_rest(model, mesh)


def _replicate_the_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every other weight a replicated one of the same mesh, so that the optimizer finds all weights on one."""
    replicated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        plain = [(name, each) for name, each in module.named_parameters(recurse=False) if not isinstance(each, DTensor)]
        for name, parameter in plain:
            if id(parameter) not in replicated:  # a tied weight stays one weight
                replicated[id(parameter)] = nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()]))
            module.register_parameter(name, replicated[id(parameter)])
        if plain:
            module.forward = functools.partial(_on_local_weights, module, module.forward)


def _on_local_weights(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    held: dict[str, Any] = vars(module)["_parameters"]
    weights: dict[str, Any] = dict(module.named_parameters(recurse=False))
    held.update({name: weight.to_local() for name, weight in weights.items()})
    try:
        return forward(*inputs, **options)
    finally:
        held.update(weights)
