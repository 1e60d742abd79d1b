"""Mends vLLM on a CPU: old weights after a load (tied heads, experts), adapters, Mamba 2 and LFM2.

The kernels compute from a packed copy of a layer's weights, which is made when the layer loads them. Two kinds of
layers miss that in a later load, so the engine would sample with other weights than it was given:

* A tied head loads no weights, because its weights are the embeddings' tensor. It would keep its first copy.
* Experts are packed at their first load alone. A later one would leave unpacked numbers in the packed tensors.

Both are packed again here at the end of each load, from a directory or memory. A GPU has no packed copies.

The kernels copy the factors of its adapter for each token, and read the index -1, a token without adapter, as the last
slot. Here the tokens of an adapter are multiplied at once, and those without one get zero.

The kernel of Mamba 2 returns the state after a prompt alone. vLLM asks it for the state at a block's end too, where a
prompt is longer than a block, and would end. So prompts are split there, as those of other recurrent layers.

The kernel of rotary embeddings counts heads by a row's length. It turns queries that come as a row a head, as LFM2's,
by the positions of other tokens. Here they come as a row a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

FINISH = "finalize_layerwise_processing"
PACKED = "cpu_linear"
"""Attribute of a layer with a packed copy: what computes from it."""
SET_UP = "_setup_kernel"
"""vLLM's method that prepares experts which have loaded their weights."""
CHECKPOINTS = "num_prefill_checkpoint_blocks"
"""How many states of a layer are kept within the pass over a prompt."""


def register() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.platforms import current_platform

    pack_tied_heads(layerwise)
    pack_experts(UnquantizedFusedMoEMethod, CPUUnquantizedExperts)
    multiply_by_adapter(lora_ops, punica_cpu)
    if current_platform.is_cpu():
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
        from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

        split_prompts(MambaMixer2)
        rotate_rows(RotaryEmbedding)


def pack_tied_heads(layerwise: ModuleType) -> None:
    """Let vLLM, whose module `layerwise` reloads models, pack tied heads again at the end of each load."""
    finish: Callable[..., Any] = getattr(layerwise, FINISH)

    @functools.wraps(finish)
    def finish_and_pack(model: Any, *arguments: Any, **options: Any) -> Any:
        tied = [layer for layer in model.modules() if _loaded_nothing(layer, layerwise.get_layerwise_info(layer))]
        result = finish(model, *arguments, **options)
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)
        return result

    setattr(layerwise, FINISH, finish_and_pack)


def _loaded_nothing(layer: Any, load: Any) -> bool:
    """Return whether a layer with a packed copy got no weights of its own in a load that replaces earlier ones."""
    if not hasattr(layer, PACKED) or not hasattr(layer, "quant_method"):
        return False
    return bool(load.can_load() and load.load_numel <= 0 and load.kernel_tensors is not None)


def pack_experts(method: type[Any], packed: type[Any]) -> None:
    """Let `method`, which prepares experts, pack those of the class `packed` at each load, not at the first alone."""
    set_up: Callable[..., Any] = getattr(method, SET_UP)

    @functools.wraps(set_up)
    def set_up_and_pack(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        is_later = self.moe_kernel is not None
        set_up(self, layer, *arguments, **options)
        if is_later and isinstance(self.moe_kernel.fused_experts, packed):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(method, SET_UP, set_up_and_pack)


def multiply_by_adapter(*modules: ModuleType) -> None:
    """Let the kernels of adapters multiply all tokens of one at once, where they are defined and in other modules."""

    def shrink(inputs: Any, factors: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        product = _by_adapter(inputs, factors, indices, output.dtype)
        output[:, : product.shape[1]] = scaling * product

    def expand(inputs: Any, factors: Any, output: Any, indices: Any, add_inputs: bool = True) -> None:
        # Adapter and model may be padded differently.
        expand_slice(inputs, factors, output, indices, 0, min(factors.shape[-2], output.shape[1]), add_inputs)

    def expand_slice(
        inputs: Any, factors: Any, output: Any, indices: Any, start: int, size: int, add_inputs: bool = True
    ) -> None:
        product = _by_adapter(inputs, factors[..., :size, :], indices, output.dtype)
        chosen = output[: len(product), start : start + size]
        (chosen.add_ if add_inputs else chosen.copy_)(product[: len(chosen)])

    for module in modules:
        for name, kernel in {"bgmv_shrink": shrink, "bgmv_expand": expand, "bgmv_expand_slice": expand_slice}.items():
            setattr(module, name, kernel)


def _by_adapter(inputs: Any, factors: Any, indices: Any, dtype: Any) -> Any:
    """Return each token's activations times the factor of its adapter, 0 without one. [tokens, rows of a factor]."""
    inputs, factors = inputs.to(dtype), factors.squeeze(1) if factors.dim() == 4 else factors
    if torch.compiler.is_compiling():  # a compiled graph cannot ask which slots there are
        return torch.einsum("ti,toi->to", inputs, factors[indices].to(dtype)).masked_fill(indices.unsqueeze(1) < 0, 0)
    slots = sorted(set(indices.tolist()))
    if len(slots) == 1 and slots[0] >= 0:
        return inputs @ factors[slots[0]].to(dtype).T
    product = inputs.new_zeros(len(inputs), factors.shape[-2])
    for slot in slots:
        if slot >= 0:
            product[indices == slot] = inputs[indices == slot] @ factors[slot].to(dtype).T
    return product


def split_prompts(mixer: type[Any]) -> None:
    """Let vLLM split a prompt where a state is kept."""
    specify: Callable[..., Any] = mixer.get_kv_cache_spec

    @functools.wraps(specify)
    def specify_without_checkpoint(self: Any, config: Any) -> Any:
        found = specify(self, config)
        if not getattr(found, CHECKPOINTS, 0):
            return found
        return dataclasses.replace(found, **{CHECKPOINTS: 0, "prefill_checkpoint_alignment": None})

    mixer.get_kv_cache_spec = specify_without_checkpoint


def rotate_rows(rotary: type[Any]) -> None:
    """Let rotary embeddings turn a row a token."""
    rotate: Callable[..., Any] = rotary.forward_cpu

    @functools.wraps(rotate)
    def rotate_flat(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        if query.dim() < positions.dim() + 2:
            turned: tuple[Any, Any] = rotate(self, positions, query, key)
            return turned
        flat = [None if each is None else each.flatten(-2) for each in (query, key)]
        first, second = rotate(self, positions, *flat)
        return first.view(query.shape), None if key is None else second.view(key.shape)

    rotary.forward_cpu = rotate_flat
