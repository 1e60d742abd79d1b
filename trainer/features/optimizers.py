"""The optimizer: float32 masters of bfloat16 weights, and whether its state lies on the device or the host.

Weights in bfloat16, or an optimizer's state on the host, need AdamW over float32 copies of the weights: a small step
changes no bit of a bfloat16 weight, so the steps are added up in a float32 master of each weight, which the weight is
then rounded from. Masters and moments may lie in host memory, where the step is computed too.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from trainer.model import optimizer
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.settings import Settings

MASTER, FIRST, SECOND = "master", "exp_avg", "exp_avg_sq"


class OptimizerSettings(Settings):
    """Where the optimizer's state lies."""

    optimizer_state: Literal["device", "host", "8bit"] = "device"
    """Where and how Adam's moments are kept: in float32 beside the weights, in float32 in `host` memory, where the step
    is computed too, or in `8bit` by the package bitsandbytes, on CUDA. The last two are for one process."""


def state_of(settings: TrainerSettings) -> str:
    assert isinstance(settings, OptimizerSettings)
    return settings.optimizer_state


def make_optimizer(parameters: list[Parameter], settings: TrainerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters: the core's, unless a setting or bfloat16 needs another.

    Raises:
        SettingsError: The package of `optimizer_state` is not installed.
    """
    options, state = optimizer.options_of(settings), state_of(settings)
    is_coarse = any(parameter.dtype is not torch.float32 for parameter in parameters)
    _check(state, has_coarse_weights=is_coarse)
    if state == "8bit":
        bitsandbytes = importlib.import_module("bitsandbytes")
        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(parameters, **options)
        return made
    if is_coarse or state == "host":
        return MasterAdamW(parameters, **options, on_host=state == "host")
    return optimizer.make_optimizer(parameters, settings)


def check_optimizer(settings: TrainerSettings) -> None:
    """Check that the optimizer's state can be kept as the settings ask.

    Raises:
        SettingsError: A package is missing, or two settings do not fit together.
    """
    _check(state_of(settings), has_coarse_weights=settings.weights_dtype != "float32")


def _check(state: str, *, has_coarse_weights: bool) -> None:
    if state != "8bit":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SettingsError(
            "optimizer_state='8bit' needs the package 'bitsandbytes', which is not installed: run `pip install "
            "bitsandbytes`, or set optimizer_state='host'"
        )
    if has_coarse_weights:
        raise SettingsError(
            "optimizer_state='8bit' keeps no float32 masters, which weights in bfloat16 need: set "
            "weights_dtype='float32', or optimizer_state='host'"
        )


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
        own = ((weight, group["on_host"]) for group in self.param_groups for weight in group["params"])
        for number, (weight, on_host) in zip(saved, own, strict=True):
            place = torch.device("cpu") if on_host else weight.device
            for name, value in state_dict["state"].get(number, {}).items():
                at = torch.device("cpu") if name == "step" else place
                self.state[weight][name] = value.detach().to(device=at, dtype=torch.float32, copy=True)
