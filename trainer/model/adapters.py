"""The adapters of several policies over one base model in memory.

An adapter is put in place by giving its tensors to the model's modules: no value is copied, and an optimizer that is
bound to them keeps what it updates. So a policy computes the same numbers, bit for bit, whether it shares its base
model or not.
"""

from __future__ import annotations

import torch
from torch import nn


class Adapter:
    """The trained tensors of a model, as one policy has them."""

    def __init__(self, places: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
        self._places = places

    @classmethod
    def in_place(cls, model: nn.Module) -> Adapter:
        """Return the adapter that a model computes with."""
        modules = model.modules()
        found = [(module, *named) for module in modules for named in module.named_parameters(recurse=False)]
        return cls([place for place in found if place[2].requires_grad])

    def copied(self) -> Adapter:
        """Return an adapter with equal values in tensors of its own, without gradients."""
        return Adapter([(module, name, _copied(parameter)) for module, name, parameter in self._places])

    def put(self) -> None:
        """Let the model compute with this adapter."""
        for module, name, parameter in self._places:
            setattr(module, name, parameter)


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().clone())
    if parameter.dtype is not torch.float32:
        made.grad_dtype = torch.float32  # rows are added up in it
    return made
