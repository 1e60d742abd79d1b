"""The parts that a workflow is built from, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from trainer.agent import AgentRule, PolicyAgent
from trainer.policy import Policy
from trainer.settings import TrainerSettings
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
