"""What vLLM's CPU kernels get wrong: loads of tied heads and experts, calls beside adapters, Mamba 2 and LFM2.

The kernels compute from a packed copy of a layer's weights, which is made when the layer loads them. Two kinds of
layers miss that in a later load, so the engine would sample with other weights than it was given:

* A tied head loads no weights, because its weights are the embeddings' tensor. It would keep its first copy.
* Experts are packed at their first load alone. A later one would leave unpacked numbers in the packed tensors.

Both are packed again here at the end of each load, from a directory or memory. A GPU has no packed copies.

The kernels select the adapter of each token by the index of its slot, and mark a token without adapter by the index -1.
As an index, that is the last slot: such a token would get the adapter there, as soon as another token of the batch has
any. What such a token gets from the first factor of an adapter is set to zero here, so its second factor adds nothing.
The kernels for a GPU skip these tokens themselves.

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

FINISH = "finalize_layerwise_processing"
PACKED = "cpu_linear"
"""Attribute of a layer with a packed copy: what computes from it."""
SHRINK = "bgmv_shrink"
"""vLLM's function that multiplies each token's activations with the first factor of its adapter."""
SET_UP = "_setup_kernel"
"""vLLM's method that prepares experts which have loaded their weights."""
CHECKPOINTS = "num_prefill_checkpoint_blocks"
"""How many states of a layer are kept within the pass over a prompt."""


def pack_tied_heads(layerwise: ModuleType) -> None:
    """Let vLLM pack tied heads again at the end of each load.

    Args:
        layerwise: `vllm.model_executor.model_loader.reload.layerwise`.
    """
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
    """Let vLLM pack experts at each load, not at the first one alone.

    Args:
        method: `UnquantizedFusedMoEMethod`, which prepares experts.
        packed: `CPUUnquantizedExperts`, which compute from packed weights.
    """
    set_up: Callable[..., Any] = getattr(method, SET_UP)

    @functools.wraps(set_up)
    def set_up_and_pack(self: Any, layer: Any, *arguments: Any, **options: Any) -> None:
        is_later = self.moe_kernel is not None
        set_up(self, layer, *arguments, **options)
        if is_later and isinstance(self.moe_kernel.fused_experts, packed):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setattr(method, SET_UP, set_up_and_pack)


def leave_out_tokens_without_adapter(kernels: ModuleType, wrapper: ModuleType) -> None:
    """Let the first factors of all adapters give zero for tokens without adapter.

    Args:
        kernels: `vllm.lora.ops.torch_ops.lora_ops`.
        wrapper: `vllm.lora.punica_wrapper.punica_cpu`, which calls the function too.
    """
    shrink: Callable[..., Any] = getattr(kernels, SHRINK)

    @functools.wraps(shrink)
    def shrink_and_leave_out(inputs: Any, factors: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, factors, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(1), 0)

    for module in (kernels, wrapper):
        setattr(module, SHRINK, shrink_and_leave_out)


def split_prompts(mixer: type[Any]) -> None:
    """Let vLLM split a prompt where a state is kept.

    Args:
        mixer: `MambaMixer2`.
    """
    specify: Callable[..., Any] = mixer.get_kv_cache_spec

    @functools.wraps(specify)
    def specify_without_checkpoint(self: Any, config: Any) -> Any:
        found = specify(self, config)
        if not getattr(found, CHECKPOINTS, 0):
            return found
        return dataclasses.replace(found, **{CHECKPOINTS: 0, "prefill_checkpoint_alignment": None})

    mixer.get_kv_cache_spec = specify_without_checkpoint


def rotate_rows(rotary: type[Any]) -> None:
    """Let rotary embeddings turn a row a token.

    Args:
        rotary: `RotaryEmbedding`.
    """
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
