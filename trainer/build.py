"""The parts that a workflow is built from, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import lr_scheduler

from trainer.policy.agent import AgentRule, PolicyAgent
from trainer.policy.model import Policy
from trainer.settings import TrainerSettings
from turnwise.errors import SettingsError
from turnwise.types import PolicyKind

OptimizerLike = torch.optim.Optimizer | Callable[[list[Parameter]], torch.optim.Optimizer]
"""A torch optimizer, of which class and defaults are taken, or what makes one for given parameters."""


def as_settings(config: TrainerSettings | Mapping[str, Any]) -> TrainerSettings:
    """Return the settings that a mapping, an omegaconf `DictConfig` among them, stands for."""
    if isinstance(config, TrainerSettings):
        return config
    plain: Mapping[str, Any] = config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        plain = OmegaConf.to_container(config, resolve=True)
    return TrainerSettings(**{str(key): value for key, value in plain.items()})


def make_agent(settings: TrainerSettings) -> PolicyAgent:
    """Return the policy with its loss, not loaded yet."""
    spec = settings.policy_spec()
    rule = AgentRule(
        loss=settings.loss_rule(),
        aggregation=settings.aggregation,
        session_tokens=settings.session_tokens,
        row_tokens=settings.row_tokens,
        packing=settings.packing,
        max_grad_norm=settings.max_grad_norm,
        max_logprob_gap=settings.max_logprob_gap,
        proximal=settings.proximal,
    )
    needs_reference = settings.kl_coef > 0 and settings.kind is PolicyKind.FULL
    return PolicyAgent(Policy(spec), rule, Policy(spec) if needs_reference else None)


def make_optimizer(settings: TrainerSettings) -> OptimizerLike:
    """Return what makes the optimizer of given parameters."""
    return lambda parameters: torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_epsilon,
        weight_decay=settings.weight_decay,
    )


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
