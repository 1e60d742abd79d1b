"""All that changes while training, in one record that is saved whole.

Random numbers are derived from the seed and the count of batches. So a batch that is repeated after a crash draws the
same numbers, whatever was drawn before it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from trainer.learning.optimizer import set_position
from trainer.learning.singles import Row
from trainer.policy.adapters import Adapter
from trainer.policy.critic import Critic
from trainer.policy.model import Policy
from turnwise.types import Json

log = logging.getLogger(__name__)

TENSORS = ("model", "optimizer")
"""The parts of a state that hold tensors, without those of a critic."""
MOST_RECENT_VERSIONS = 64
"""How many versions `Progress.recent_versions` holds; nothing counts as more stale than this."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counts of a run."""

    seed: int
    num_batches: int = 0
    """Claims acked, the refused ones included."""
    update_id: int = 0
    """Of the last of them in the ledger, where ids are unique over all policies."""
    num_optimizer_steps: int = 0
    """A batch, which the ledger calls an update, takes one or more."""
    policy_version: int = 0
    """The version that the weights are."""
    num_groups: int = 0
    num_sessions: int = 0
    num_tokens: int = 0
    """Sampled tokens that carried loss."""
    num_refused_groups: int = 0
    """Groups that were claimed and not trained on, for whatever reason."""
    recent_versions: tuple[int, ...] = (0,)
    """The versions that the weights came from, oldest first, this version last; the latest ones only."""
    rewound_to: int | None = None
    """The version that the run went back to: the pinned one until no version is pinned, or the one before a failed one
    until the next batch."""

    def staleness_of(self, version: int) -> int:
        """Return how many versions of this run are newer than the one that sampled something."""
        return sum(known > version for known in self.recent_versions)

    def oldest_trainable(self, max_staleness: int | None) -> int | None:
        """Return the oldest version whose turns may be trained; None where there is no bound."""
        if max_staleness is None:
            return None
        return self.recent_versions[max(len(self.recent_versions) - 1 - max_staleness, 0)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `setup` returns, and `step` takes and returns.

    The tensors behind `policy`, `optimizer` and `scheduler` are updated in place, since torch binds an optimizer to
    them. Do not use a `State` again after it was passed to `step`.
    """

    progress: Progress
    policy: Policy
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    metrics: Json = dataclasses.field(default_factory=dict)
    """Gauges of the latest batch."""
    buffer: Json = dataclasses.field(default_factory=dict)
    """The replay buffer's index; empty on policy."""
    singles: tuple[Row, ...] = ()
    """Values of recent single sessions, oldest first: the baseline of the coming ones."""
    critic: Critic | None = None
    """The critic of GAE, updated in place like the policy."""
    adapter: Adapter | None = None
    """What this state trains of a model that states of other policies train too; None for whole weights."""

    def enter(self) -> None:
        """Let the model compute with this state's adapter; before a step where several policies share a model."""
        if self.adapter is not None:
            self.adapter.put()

    def with_progress(self, **changes: Any) -> State:
        """Return this state with other counts."""
        return dataclasses.replace(self, progress=dataclasses.replace(self.progress, **changes))

    def rng(self) -> np.random.Generator:
        """Return the random numbers of the coming batch, and seed torch with them."""
        sequence = np.random.SeedSequence([self.progress.seed, self.progress.num_batches])
        torch.manual_seed(int(sequence.generate_state(1)[0]))
        return np.random.default_rng(sequence)

    def values(self) -> dict[str, Any]:
        """Return the plain values that a resume needs."""
        return {
            "progress": dataclasses.asdict(self.progress),
            "metrics": self.metrics,
            "buffer": self.buffer,
            "has_critic": self.critic is not None,
            "singles": list(map(tuple, self.singles)),
        }

    def tensors(self) -> dict[str, Any]:
        """Return the tensors that a resume needs, of which this process holds all or its shards; not copied."""
        own = {} if self.critic is None else self.critic.tensors()
        optimizer = get_optimizer_state_dict(self.policy.model, self.optimizer)
        return {"model": self.policy.shards(), "optimizer": optimizer, **own}

    def restored(self, saved: dict[str, Any], fill: Callable[[dict[str, Any]], None]) -> State:
        """Return this state with the saved weights, optimizer moments and counts.

        The optimizer's settings and the seed stay as they are now. The learning rate follows from the count of updates.

        Args:
            saved: What `values` returned.
            fill: Gives tensors their saved values.
        """
        settings = [_settings_of(group) for group in self.optimizer.param_groups]
        self._load_tensors(fill, has_critic=saved["has_critic"] and self.critic is not None)
        for group, kept in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(kept)
        versions = tuple(saved["progress"]["recent_versions"])
        progress = Progress(**(saved["progress"] | {"seed": self.progress.seed, "recent_versions": versions}))
        set_position(self.scheduler, progress.num_optimizer_steps)
        singles = tuple(Row(*row) for row in saved.get("singles", ()))
        return dataclasses.replace(
            self, progress=progress, metrics=saved["metrics"], buffer=saved["buffer"], singles=singles
        )

    def _load_tensors(self, fill: Callable[[dict[str, Any]], None], *, has_critic: bool) -> None:
        """Load weights and moments; a critic only where one was saved."""
        tensors = self.tensors()
        if self.critic is not None and not has_critic:
            log.warning("the checkpoint has no critic: a new one is trained")
            tensors = {name: tensors[name] for name in TENSORS}
        fill(tensors)
        self.policy.load_shards(tensors["model"])
        set_optimizer_state_dict(self.policy.model, self.optimizer, tensors["optimizer"])
        if self.critic is not None and has_critic:
            self.critic.load_tensors(tensors)


def copied(tensors: Any) -> Any:
    """Return nested dictionaries of tensors, copied to the CPU, for a thread that writes while training continues."""
    if isinstance(tensors, dict):
        return {name: copied(value) for name, value in tensors.items()}
    if isinstance(tensors, torch.Tensor):
        value = tensors.detach()
        return value.clone() if value.device.type == "cpu" else value.cpu()
    return tensors


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
