"""The learning rate of each optimizer step: warm-up by steps, decay by batches, so that it ends with the last batch.

A batch of few groups takes fewer steps than `num_minibatches`, and one that is refused takes none. By steps a decay
would end above zero; a run ends after `total_batches` batches, whatever they were.
"""

from __future__ import annotations

import math

import torch

from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError


class Schedule:
    """A linear warm-up, then constant, linear to zero, or half a cosine to zero.

    The rate is a function of the run's counts, so a run can resume under another schedule or rate.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TrainerSettings) -> None:
        if settings.schedule != "constant" and settings.total_batches is None:
            raise SettingsError(
                f"schedule={settings.schedule!r} needs total_batches: set it, or use schedule='constant'"
            )
        self._optimizer = optimizer
        self.base_rates = [group["lr"] for group in optimizer.param_groups]
        self._kind = settings.schedule
        self._warmup = settings.num_warmup_updates
        self._steps_of_batch = settings.num_minibatches * settings.reuse_epochs
        self._length = max((settings.total_batches or 0) * self._steps_of_batch - self._warmup, 1)

    def set(self, num_updates: int, num_batches: float) -> None:
        """Set the rates of the next step: after these steps and batches, of the present one the part that is done."""
        factor = self.factor(num_updates, num_batches)
        for group, rate in zip(self._optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * factor

    def factor(self, num_updates: int, num_batches: float) -> float:
        risen = min((num_updates + 1) / (self._warmup + 1), 1.0)
        if self._kind == "constant":
            return risen
        done = min(max((num_batches * self._steps_of_batch - self._warmup) / self._length, 0.0), 1.0)
        return min(risen, 1.0 - done if self._kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2)
