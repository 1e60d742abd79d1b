"""The output layer of a model, which can be left out of its forward pass.

The loss then starts from hidden states and computes logits chunk by chunk (`trainer.learning.logprobs`). That is only
right where the output layer is all that lies between hidden states and logits, so a layer with a bias, and models that
scale or cap their logits, keep their own forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Names in a model's configuration of what it does to logits after the output layer."""


class OutputLayer:
    """A linear output layer whose module can pass hidden states through."""

    def __init__(self, module: nn.Linear) -> None:
        self._module = module
        self._forward = module.forward
        self._is_left_out = False
        module.forward = self._pass  # type: ignore[assignment,method-assign]

    @classmethod
    def of(cls, model: Any) -> OutputLayer | None:
        """Return the model's output layer; None where more than it lies between hidden states and logits."""
        module = model.get_output_embeddings()
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        if type(module) is not nn.Linear or module.bias is not None:
            return None
        if any(getattr(config, name, None) not in (None, 1.0) for name in CHANGES_LOGITS):
            return None
        return cls(module)

    @property
    def weight(self) -> Tensor:
        """[V, H]."""
        return self._module.weight

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Let the model return hidden states in place of logits inside the block."""
        self._is_left_out = True
        try:
            yield
        finally:
            self._is_left_out = False

    def _pass(self, hidden: Tensor) -> Tensor:
        return hidden if self._is_left_out else self._forward(hidden)
