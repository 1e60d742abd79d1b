"""Output heads that are tied to the embeddings follow every load of weights.

vLLM's CPU kernels compute from a packed copy of a layer's weights, which is made when the layer loads them. A tied head
loads none, because its weights are the embeddings' tensor. So the copy of the first load would stay, and the engine
would sample with an old head. Such a layer is packed again here at the end of each load, from a directory or memory.
A GPU has no packed copies, so nothing is done there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

FINISH = "finalize_layerwise_processing"
PACKED = "cpu_linear"
"""Attribute of a layer with a packed copy: what computes from it."""


def follow_loads(layerwise: ModuleType) -> None:
    """Let vLLM pack tied heads again at the end of each load; `layerwise` is its module of layer-wise reloads."""
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
