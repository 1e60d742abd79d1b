"""The parts of a policy's training, made from its settings."""

from __future__ import annotations

import dataclasses

from trainer.claims.claims import Claims
from trainer.claims.ledger import StopFlag, UpdateIds
from trainer.evaluate import Evaluator
from trainer.model.agent import PolicyAgent
from trainer.model.critic import Critic
from trainer.model.model import Policy
from trainer.model.optimizer import make_optimizer
from trainer.replay import ReplayBuffer
from trainer.settings import TrainerSettings
from trainer.versions.state import OptimizerLike
from turnwise.store.database import Database
from turnwise.types import Policy as NamedPolicy
from turnwise.types import PolicyKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts that the policies of one process share."""

    db: Database
    model: Policy
    """They train adapters of it, in turns (`State.enter`)."""
    update_ids: UpdateIds
    stopped: StopFlag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a training; nothing is loaded yet."""

    claims: Claims
    learner: PolicyAgent
    optimizer: OptimizerLike
    evaluator: Evaluator | None
    buffer: ReplayBuffer | None = None
    """Claimed groups go into it, and batches are sampled from it; None trains the claimed groups themselves."""


def make_parts(
    settings: TrainerSettings, policy: NamedPolicy | None = None, shared: Shared | None = None, *, has_buffer: bool
) -> Parts:
    claims = Claims(
        Database(settings.database.get_secret_value()) if shared is None else shared.db,
        settings,
        with_imported=not has_buffer and not settings.algorithm.needs_behaviour,
        is_paced=not has_buffer,
        policy=policy,
        update_ids=None if shared is None else shared.update_ids,
        stopped=None if shared is None else shared.stopped,
    )
    model = Policy(settings) if shared is None else shared.model
    needs_reference = settings.algorithm.needs_reference and settings.kind is PolicyKind.FULL
    reference = Policy(settings) if needs_reference else None
    critic = Critic(model) if settings.algorithm.needs_values else None
    return Parts(
        claims=claims,
        learner=PolicyAgent(model, settings, reference, critic),
        optimizer=lambda parameters: make_optimizer(parameters, settings),
        evaluator=Evaluator(claims, settings),
        buffer=ReplayBuffer(claims, settings) if has_buffer else None,
    )
