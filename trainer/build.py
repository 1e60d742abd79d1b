"""The parts that a workflow is built from, made from its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from trainer.batch.optimizer import make_optimizer
from trainer.evaluate import LedgerEvaluator
from trainer.ledger import UpdateIds
from trainer.model.agent import PolicyAgent
from trainer.model.critic import Critic
from trainer.model.model import Policy
from trainer.pacing import StopFlag
from trainer.settings import TrainerSettings
from trainer.source import LedgerSource
from turnwise.store.database import Database
from turnwise.types import Policy as NamedPolicy
from turnwise.types import PolicyKind

OptimizerLike = torch.optim.Optimizer | Callable[[list[Parameter]], torch.optim.Optimizer]
"""A torch optimizer, whose class and defaults are used, or a function that makes one for given parameters."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the workflows of one process share."""

    db: Database
    model: Policy
    """They train adapters of it, in turns (`State.enter`)."""
    update_ids: UpdateIds
    stopped: StopFlag
    """Set once the process is to stop."""


def as_settings(config: TrainerSettings | Mapping[str, Any]) -> TrainerSettings:
    """Return the settings for a mapping, which may be an omegaconf `DictConfig`."""
    if isinstance(config, TrainerSettings):
        return config
    plain: Mapping[str, Any] = config
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        plain = OmegaConf.to_container(config, resolve=True)
    return TrainerSettings(**{str(key): value for key, value in plain.items()})


def make_source(
    settings: TrainerSettings, policy: NamedPolicy | None, shared: Shared | None, *, with_imported: bool = False
) -> LedgerSource:
    """Return the source of a policy's experiences; `policy` None is the default one."""
    if shared is None:
        db = Database(settings.database.get_secret_value())
        return LedgerSource(db, settings, with_imported=with_imported, policy=policy)
    return LedgerSource(
        shared.db,
        settings,
        with_imported=with_imported,
        policy=policy,
        update_ids=shared.update_ids,
        stopped=shared.stopped,
    )


def make_evaluator(settings: TrainerSettings, source: LedgerSource) -> LedgerEvaluator:
    """Return what measures the policy of a source."""
    command, seconds = settings.evaluation_command, settings.evaluation_seconds
    return LedgerEvaluator(source.db, command, seconds, settings.proxy_url, source.policy, source.stopped)


def make_agent(settings: TrainerSettings, shared: Shared | None = None) -> PolicyAgent:
    """Return the policy with its loss; nothing is loaded yet."""
    needs_reference = settings.algorithm.needs_reference and settings.kind is PolicyKind.FULL
    policy = Policy(settings) if shared is None else shared.model
    reference = Policy(settings) if needs_reference else None
    return PolicyAgent(policy, settings, reference, Critic(policy) if settings.algorithm.needs_values else None)


def optimizer_factory(settings: TrainerSettings) -> OptimizerLike:
    """Return the function that makes the optimizer of given parameters."""
    return lambda parameters: make_optimizer(parameters, settings)
