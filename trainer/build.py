"""The parts that a workflow is built from, made from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from trainer.learning.optimizer import make_optimizer
from trainer.policy.agent import PolicyAgent
from trainer.policy.critic import Critic
from trainer.policy.model import Policy
from trainer.settings import TrainerSettings
from turnwise.types import PolicyKind

OptimizerLike = torch.optim.Optimizer | Callable[[list[Parameter]], torch.optim.Optimizer]
"""A torch optimizer, whose class and defaults are used, or a function that makes one for given parameters."""


def as_settings(config: TrainerSettings | Mapping[str, Any]) -> TrainerSettings:
    """Return the settings for a mapping, which may be an omegaconf `DictConfig`."""
    if isinstance(config, TrainerSettings):
        return config
    plain: Mapping[str, Any] = config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        plain = OmegaConf.to_container(config, resolve=True)
    return TrainerSettings(**{str(key): value for key, value in plain.items()})


def make_agent(settings: TrainerSettings, shared: Policy | None = None) -> PolicyAgent:
    """Return the policy with its loss; nothing is loaded yet.

    `shared` is the model of other policies, which are trained as adapters of it.
    """
    needs_reference = settings.algorithm.needs_reference and settings.kind is PolicyKind.FULL
    policy, reference = shared or Policy(settings), Policy(settings) if needs_reference else None
    return PolicyAgent(policy, settings, reference, Critic(policy) if settings.algorithm.needs_values else None)


def optimizer_factory(settings: TrainerSettings) -> OptimizerLike:
    """Return the function that makes the optimizer of given parameters."""
    return lambda parameters: make_optimizer(parameters, settings)
