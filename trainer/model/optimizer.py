"""The optimizer of float32 weights: AdamW, which keeps its moments beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter

from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError

WEIGHT_DECAY = 0.0
"""AdamW's: a policy that is trained on from a good model is not pulled towards zero."""


def make_optimizer(parameters: list[Parameter], settings: TrainerSettings) -> torch.optim.Optimizer:
    """Return torch's AdamW of these parameters, fused on CUDA.

    Raises:
        SettingsError: A weight is coarser than float32, so that small steps would change no bit of it.
    """
    if any(parameter.dtype is not torch.float32 for parameter in parameters):
        raise SettingsError(
            f"weights_dtype={settings.weights_dtype!r} needs an optimizer with float32 masters, which is a feature: "
            "set it to 'float32'"
        )
    on_cuda = all(parameter.device.type == "cuda" for parameter in parameters)
    return torch.optim.AdamW(parameters, **options_of(settings), fused=True if on_cuda else None)


def options_of(settings: TrainerSettings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.adam_epsilon,
        "weight_decay": WEIGHT_DECAY,
    }
