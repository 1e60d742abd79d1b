"""The learning rate over optimizer steps, from torch's own schedules."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler

from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError


def make_scheduler(optimizer: torch.optim.Optimizer, settings: TrainerSettings) -> lr_scheduler.LRScheduler:
    """Return the schedule: a linear warm-up, then constant, linear or half a cosine down to nothing.

    Raises:
        SettingsError: A schedule that ends was asked for, and no end.
    """
    warmup = settings.num_warmup_updates
    parts: list[lr_scheduler.LRScheduler] = []
    if warmup:
        parts.append(lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup))
    if settings.schedule == "constant":
        parts.append(lr_scheduler.ConstantLR(optimizer, factor=1.0))
    elif settings.total_batches is None:
        raise SettingsError(f"schedule={settings.schedule!r} needs an end: set total_batches")
    else:
        total = settings.total_batches * settings.num_minibatches * settings.reuse_epochs
        length = max(total - warmup, 1)
        if settings.schedule == "linear":
            parts.append(lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=length))
        else:
            parts.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=length))
    return parts[0] if len(parts) == 1 else lr_scheduler.SequentialLR(optimizer, parts, milestones=[warmup])
