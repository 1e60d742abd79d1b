"""What changes the speed and memory of a model but not its results: checkpointing of layers, and kernels."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from trainer.model.loading import base_of

STATE_BYTES = 16
"""Of a trained parameter: weight, gradient and two moments in float32."""
FROZEN_BYTES = 4
ROW_TOKENS = 8192
"""Tokens of the row that activations are estimated for."""
ACTIVATIONS_OF_LAYER = 80
"""Bytes that a transformer layer keeps for the backward pass, per token and unit of its hidden size: as measured with
bfloat16 autocast of float32 weights at 0.6B, and more than the 65 at 1.7B."""
GRADIENT_BYTES = 4
"""Of a trained parameter in each of several processes: FSDP keeps the whole gradient from row to row, and reduces it
with the last row of a step."""


def needs_checkpointing(model: nn.Module, device: torch.device) -> bool:
    """Return whether training the model would not fit into the device's free memory without checkpointing."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    # Weights that are on the device already are not in `free`, and those of an empty model are sharded.
    shards = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return memory_of_training(model, shards) > free + _bytes_on(model, device)


def memory_of_training(model: nn.Module, num_shards: int = 1) -> int:
    """Return an estimate of the bytes that each process needs.

    They are its share of weights and optimizer, the gradient that several processes keep whole, and the activations of
    a row.
    """
    config: Any = base_of(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    state = (STATE_BYTES * trained + FROZEN_BYTES * frozen) // num_shards
    whole_gradient = GRADIENT_BYTES * trained if num_shards > 1 else 0
    activations = ACTIVATIONS_OF_LAYER * ROW_TOKENS * int(text.hidden_size) * int(text.num_hidden_layers)
    return state + whole_gradient + activations


def checkpoint_layers(model: nn.Module) -> None:
    """Recompute the activations of each layer in the backward pass."""
    base = base_of(model)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    if base is not model:
        base.enable_input_require_grads()  # with frozen embeddings no input of a layer would need a gradient


def has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def use_liger(model: Any) -> None:
    """Replace norm, rotary embedding and SwiGLU of a model by liger-kernel's, where it knows the architecture.

    The loss is left as it is: it is computed in chunks already.
    """
    patch = importlib.import_module("liger_kernel.transformers").monkey_patch
    known = getattr(patch, "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    if model.config.model_type in known:
        patch._apply_liger_kernel_to_instance(  # noqa: SLF001  liger's own entry for models that exist already
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    return sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters() if parameter.device == device
    )
