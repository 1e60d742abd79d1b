"""How the processes of one trainer divide the model: replicas, shards, tensor and context parallelism.

The device mesh has one dimension each for replicas (HSDP), for shards (FSDP2) and for parts of layers (tensor
parallelism). The processes of one context are neighbours in the dimension of shards: they hold different shards and
different tokens of one row, and FSDP2 adds up their gradients as it does for different rows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

from trainer.parallel import context_group
from trainer.policy.context_parallel import ContextGroup
from trainer.policy.loading import base_of
from trainer.policy.router_replay import ROUTERS
from turnwise.errors import SettingsError

REPLICA, TENSOR = "replica", "tensor"
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""Linear layers of attention whose outputs are divided; those of Qwen3, Llama and Gemma have these names."""
ROW = ("self_attn.o_proj",)
"""Linear layers of attention whose inputs are divided."""
MLP_COLUMN, MLP_ROW = ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
"""The same of a dense MLP."""
ROUTER, EXPERTS = "mlp.gate", "mlp.experts"
"""The parts of a mixture of experts: each process holds the whole router and an equal share of the experts."""
BY_HEAD = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms that run on the heads of a process, where a model has them."""


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


def divide_layers(model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Divide the linear layers and the experts of each decoder layer over the mesh, and replicate all other weights.

    Raises:
        SettingsError: A layer has none of the known linear layers.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    for layer in layers:
        names = dict(layer.named_modules())
        has_experts = type(names.get(ROUTER)).__name__ in ROUTERS
        columns, rows = (COLUMN, ROW) if has_experts else (COLUMN + MLP_COLUMN, ROW + MLP_ROW)
        if missing := [name for name in (*columns, *rows) if not isinstance(names.get(name), nn.Linear)]:
            raise SettingsError(
                f"tensor_parallel does not know the layers of {type(base_of(model)).__name__}: it has no linear "
                f"{missing[0]}. Set tensor_parallel=1, which shards any model. Models like Qwen3, Qwen3-MoE, Llama and "
                "Gemma are supported"
            )
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in BY_HEAD if name in names}
        parallelize_module(layer, mesh, plan)
        if has_experts:
            _divide_experts(names[ROUTER], names[EXPERTS], mesh)
    _replicate_the_rest(model, mesh)


def _divide_experts(router: Any, experts: Any, mesh: DeviceMesh) -> None:
    """Replicate a router, and give each process an equal share of its experts."""
    router.forward = functools.partial(_run_local, router, _with_local_weights(router, mesh, Replicate()))
    local = _with_local_weights(experts, mesh, Shard(0))
    local.num_experts //= mesh.size()
    local._is_expert_parallel = True  # noqa: SLF001  transformers then skips the number behind the last expert
    experts.forward = functools.partial(_run_own_experts, experts, local, mesh)


def _with_local_weights(module: Any, mesh: DeviceMesh, placement: Placement) -> Any:
    """Distribute the weights of a module; return a copy without weights, which computes with this process's parts.

    The computation of experts indexes and counts tokens, which PyTorch does not support for distributed tensors.
    """
    local = copy.copy(module)
    local._parameters = {}  # noqa: SLF001  the copy would share the dictionary
    for name, weight in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [placement])))
    return local


def _run_local(module: Any, local: Any, *inputs: Tensor) -> Any:
    for name, weight in module.named_parameters(recurse=False):
        vars(local)[name] = weight.to_local()
    return local.forward(*inputs)


def _run_own_experts(
    experts: Any, local: Any, mesh: DeviceMesh, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute the tokens of this process's experts, and add up the results of all processes.

    Args:
        experts: The module with the distributed weights.
        local: Its copy that computes with this process's experts.
        mesh: The processes.
        hidden: The same in all processes. [N, H]
        chosen: Numbers of the chosen experts. [N, k]
        weights: Their weights. [N, k]
    """
    number = chosen - mesh.get_local_rank() * local.num_experts
    is_own = (number >= 0) & (number < local.num_experts)
    number = torch.where(is_own, number, local.num_experts)
    weights = torch.where(is_own, _summed_backward(weights, mesh), 0.0)
    own: Tensor = _run_local(experts, local, _summed_backward(hidden, mesh), number, weights)
    whole = DTensor.from_local(own, mesh, [Partial()], run_check=False)
    return whole.redistribute(placements=[Replicate()]).to_local()


def _summed_backward(values: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return values that are equal in all processes; their gradient is the sum over the processes."""
    return DTensor.from_local(values, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _replicate_the_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every other weight a replicated one of the same mesh, so that the optimizer finds all weights on one."""
    replicated: dict[int, nn.Parameter] = {}
    for module in model.modules():
        plain = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, DTensor)
        }
        if not plain:
            continue
        for name, parameter in plain.items():
            if id(parameter) in replicated:  # a tied weight stays one weight
                setattr(module, name, replicated[id(parameter)])
        distribute_module(module, mesh, input_fn=_as_replicated, output_fn=_as_local)
        replicated |= {id(parameter): getattr(module, name) for name, parameter in plain.items()}


def _as_replicated(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(
        DTensor.from_local(each, mesh, [Replicate()], run_check=False) if isinstance(each, Tensor) else each
        for each in inputs
    )


def _as_local(_module: nn.Module, outputs: Any, _mesh: DeviceMesh) -> Any:
    return outputs.to_local() if isinstance(outputs, DTensor) else outputs
