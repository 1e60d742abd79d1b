"""How the processes of one trainer divide the model: replicas, shards, tensor and context parallelism.

The device mesh has one dimension each for replicas (HSDP), for shards (FSDP2) and for parts of layers (tensor
parallelism). The processes of one context are neighbours in the dimension of shards: they hold different shards and
different tokens of one row, and FSDP2 adds up their gradients as it does for different rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trainer.model.context_parallel import ContextGroup
from trainer.model.loading import base_of
from trainer.parallel import context_group
from turnwise.errors import SettingsError

REPLICA, TENSOR = "replica", "tensor"
LAYERS = ".layers."
"""Part of the names of what is divided; embeddings and output layer, which may be tied, are replicated."""
NORM_OF_HEADS = "replicated_with_grad_allreduce"
"""transformers' style for a norm that runs on the heads of a process."""
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
        """Processes that compute one row together."""
        return self.tensor * self.context

    def check(self, size: int) -> None:
        """Check that so many processes can be divided in this way.

        Raises:
            SettingsError: They cannot.
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
        return ContextGroup(context_group(self.tensor, self.context), self._context_rank, self.context)

    @property
    def _context_rank(self) -> int:
        return dist.get_rank() // self.tensor % self.context


def check_divisible(config: Any, tensor: int) -> None:
    """Check that a model's layers can be divided.

    Raises:
        SettingsError: They cannot.
    """
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_experts"):
        number = getattr(config, name, None)  # configurations of models with and without experts may say None
        if number is not None and number % tensor:
            raise SettingsError(
                f"tensor_parallel={tensor} does not divide the model's {name}={number}: choose a divisor of it"
            )


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide linear layers and experts over the mesh as transformers plans it, and replicate all other weights.

    Raises:
        SettingsError: transformers has no plan for this model, or one with a style that is not tested here.
    """
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
    """Compute with this process's copies of replicated weights."""
    held: dict[str, Any] = vars(module)["_parameters"]
    weights: dict[str, Any] = dict(module.named_parameters(recurse=False))
    held.update({name: weight.to_local() for name, weight in weights.items()})
    try:
        return forward(*inputs, **options)
    finally:
        held.update(weights)
