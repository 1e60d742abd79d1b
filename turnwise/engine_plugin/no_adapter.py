"""Calls without an adapter are computed without one, also in a batch with calls of adapters.

vLLM's CPU kernels select the adapter of each token by the index of its slot, and mark a token without adapter by the
index -1. As an index, that is the last slot: such a token would get the adapter there, as soon as another token of the
batch has any. What such a token gets from the first factor of an adapter is set to zero here, so its second factor adds
nothing. The kernels for a GPU skip these tokens themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

SHRINK = "bgmv_shrink"
"""vLLM's function that multiplies each token's activations with the first factor of its adapter."""


def leave_out_tokens_without_adapter(kernels: ModuleType, wrapper: ModuleType) -> None:
    """Let the first factors of all adapters give zero for tokens without adapter.

    The arguments are vLLM's modules `lora_ops` and `punica_cpu`, which calls the function too.
    """
    shrink: Callable[..., Any] = getattr(kernels, SHRINK)

    @functools.wraps(shrink)
    def shrink_and_leave_out(inputs: Any, factors: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, factors, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(1), 0)

    for module in (kernels, wrapper):
        setattr(module, SHRINK, shrink_and_leave_out)
