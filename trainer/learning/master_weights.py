"""AdamW over float32 copies of the weights, for weights that are bfloat16 or an optimizer's state that is on the host.

A small step changes no bit of a bfloat16 weight, so the steps are added up in a float32 master of each weight, which
the weight is then rounded from. Masters and moments may lie in host memory, where the step is computed too.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"
"""Names of a weight's float32 tensors in the optimizer's state."""


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) that keeps a float32 master of each weight."""

    def __init__(
        self,
        parameters: list[Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        on_host: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "on_host": on_host}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        assert closure is None, "the gradient is computed before the step"
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        states = [self._state_of(weight, on_host=group["on_host"]) for weight in weights]
        masters = [state[MASTER] for state in states]
        gradients = [
            weight.grad.to(device=master.device, dtype=torch.float32)
            for weight, master in zip(weights, masters, strict=True)
        ]
        adamw(
            masters,
            gradients,
            [state[FIRST] for state in states],
            [state[SECOND] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)

    def _state_of(self, weight: Tensor, *, on_host: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            place = torch.device("cpu") if on_host else weight.device
            state["step"] = torch.tensor(0.0)
            state[MASTER] = weight.detach().to(device=place, dtype=torch.float32, copy=True)
            state[FIRST] = torch.zeros_like(state[MASTER])
            state[SECOND] = torch.zeros_like(state[MASTER])
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; its tensors stay float32, which torch would round to the type of the weights."""
        super().load_state_dict(state_dict)
        saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, group in zip(saved, self._weights_with_group(), strict=True):
            weight, on_host = group
            place = torch.device("cpu") if on_host else weight.device
            for name, value in state_dict["state"].get(number, {}).items():
                at = torch.device("cpu") if name == "step" else place
                self.state[weight][name] = value.detach().to(device=at, dtype=torch.float32, copy=True)

    def _weights_with_group(self) -> list[tuple[Parameter, bool]]:
        return [(weight, group["on_host"]) for group in self.param_groups for weight in group["params"]]
