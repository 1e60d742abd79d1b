"""All that changes while training, in one record that is saved whole.

Random numbers are derived from the seed and the count of batches. So a batch that is repeated after a crash draws the
same numbers, whatever was drawn before it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from trainer.learning.optimizer import set_position
from trainer.policy.critic import Critic
from trainer.policy.model import Policy
from turnwise.types import Json

log = logging.getLogger(__name__)

TENSORS = ("model", "optimizer")
"""The parts of a state that hold tensors; in the file of values only where an earlier release wrote it."""
MOST_RECENT_VERSIONS = 64
"""How many versions `Progress.recent_versions` holds; nothing counts as more stale than this."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The counts of a run."""

    seed: int
    num_batches: int = 0
    """Claims acked, the refused ones included; the last `update_id` in the ledger."""
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
    critic: Critic | None = None
    """The critic of GAE, updated in place like the policy."""

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
            "critic": None if self.critic is None else self.critic.kind,
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
        if "model" in saved:
            self._load_whole(saved)
        else:
            self._load_tensors(saved.get("critic"), fill)
        for group, kept in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(kept)
        progress = _progress_from(saved["progress"] | {"seed": self.progress.seed})
        set_position(self.scheduler, progress.num_optimizer_steps)
        return dataclasses.replace(self, progress=progress, metrics=saved["metrics"], buffer=saved["buffer"])

    def _load_tensors(self, saved_critic: str | None, fill: Callable[[dict[str, Any]], None]) -> None:
        """Load weights and moments; a critic only where one of its kind was saved."""
        tensors = self.tensors()
        has_critic = self.critic is not None and saved_critic == self.critic.kind
        if self.critic is not None and not has_critic:
            log.warning("the checkpoint has no critic of kind %r: a new one is trained", self.critic.kind)
            tensors = {name: tensors[name] for name in TENSORS}
        fill(tensors)
        self.policy.load_shards(tensors["model"])
        set_optimizer_state_dict(self.policy.model, self.optimizer, tensors["optimizer"])
        if self.critic is not None and has_critic:
            self.critic.load_tensors(tensors)

    def _load_whole(self, saved: dict[str, Any]) -> None:
        """Load the tensors of a state in one file, as earlier releases wrote it; the first process sends them."""
        from_first = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        self.policy.load_trained_state(saved["model"], from_first=from_first)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        set_optimizer_state_dict(
            self.policy.model, self.optimizer, cast("dict[str, Any]", saved["optimizer"]), options=options
        )


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


def _progress_from(saved: dict[str, Any]) -> Progress:
    """Return the counts; checkpoints of releases before 0.2 name steps differently and lack the recent versions."""
    saved = dict(saved)
    if "num_updates" in saved:
        saved["num_optimizer_steps"] = saved.pop("num_updates")
    version = saved["policy_version"]
    known = saved.get("recent_versions") or range(max(0, version + 1 - MOST_RECENT_VERSIONS), version + 1)
    return Progress(**(saved | {"recent_versions": tuple(known)}))
