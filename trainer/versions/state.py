"""All that changes while training, in one record that is saved whole, and the records that training starts from.

Random numbers are derived from the seed and the count of batches. So a batch that is repeated after a crash draws the
same numbers, whatever was drawn before it. Training starts from a new run's state, or from that of a restart or of an
older version after a rollback or a pin. A checkpoint holds the settings that it was trained under. Most may change on a
restart, and are logged; a few are refused. The optimizer's settings are the current ones, never those of its saved
state.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter
from torch.optim import lr_scheduler

from trainer.batch.advantages import Row
from trainer.claims.claims import Rewind
from trainer.claims.ledger import Ledger, RunProgress
from trainer.model.adapters import Adapter
from trainer.model.agent import PolicyAgent
from trainer.model.critic import Critic
from trainer.model.model import Policy
from trainer.publish.checkpoint import Checkpoints
from trainer.replay import Buffer, Entry
from trainer.settings import TrainerSettings
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.types import Json, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

OptimizerLike = torch.optim.Optimizer | Callable[[list[Parameter]], torch.optim.Optimizer]
TENSORS = ("model", "optimizer")
"""The parts of a state that hold tensors, without those of a critic."""
MOST_RECENT_VERSIONS = 64
"""How many versions `Progress.recent_versions` holds; nothing counts as more stale than this."""
FIXED = ("kind",)
FIXED_FOR_LORA = ("model", "lora_rank", "lora_targets")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `setup` returns, and `step` takes and returns.

    The tensors behind `policy`, `optimizer` and `scheduler` are updated in place, since torch binds an optimizer to
    them. Do not use a `State` again after it was passed to `step`.
    """

    progress: RunProgress
    policy: Policy
    optimizer: torch.optim.Optimizer
    scheduler: lr_scheduler.LambdaLR
    metrics: Json = dataclasses.field(default_factory=dict)
    buffer: Buffer = ()
    """The replay buffer's index; empty on policy."""
    singles: tuple[Row, ...] = ()
    """Values of recent single sessions, oldest first: the baseline of the coming ones."""
    critic: Critic | None = None
    adapter: Adapter | None = None
    """The part of a model that this state trains, where other policies share the model; None for whole weights."""

    def enter(self) -> None:
        """Let the model compute with this state's adapter; before a step where several policies share a model."""
        if self.adapter is not None:
            self.adapter.put()

    def with_progress(self, **changes: Any) -> State:
        return dataclasses.replace(self, progress=dataclasses.replace(self.progress, **changes))

    def rng(self) -> np.random.Generator:
        """Return the random numbers of the coming batch, and seed torch with them."""
        sequence = np.random.SeedSequence([self.progress.seed, self.progress.num_batches])
        torch.manual_seed(int(sequence.generate_state(1)[0]))
        return np.random.default_rng(sequence)

    def values(self) -> dict[str, Any]:
        return {
            "progress": dataclasses.asdict(self.progress),
            "metrics": self.metrics,
            "has_critic": self.critic is not None,
            **self.beside_checkpoint(),
        }

    def beside_checkpoint(self) -> Json:
        buffer = [dataclasses.asdict(entry) for entry in self.buffer]
        return {"buffer": buffer, "singles": list(map(list, self.singles))}

    def tensors(self) -> dict[str, Any]:
        """Return the tensors that a resume needs, of which this process holds all or its shards; not copied."""
        own = {} if self.critic is None else self.critic.tensors()
        optimizer = get_optimizer_state_dict(self.policy.model, self.optimizer)
        return {"model": self.policy.shards(), "optimizer": optimizer, **own}

    def restored(self, saved: dict[str, Any], fill: Callable[[dict[str, Any]], None]) -> State:
        """Return this state with the saved weights, optimizer moments and counts, which `values` returned.

        The optimizer's settings and the seed stay as they are now. The learning rate follows from the count of updates.
        """
        tensors = ("params", "param_names")
        settings = [{k: v for k, v in group.items() if k not in tensors} for group in self.optimizer.param_groups]
        self._load_tensors(fill, has_critic=saved["has_critic"] and self.critic is not None)
        for group, kept in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(kept)
        versions = tuple(saved["progress"]["recent_versions"])
        progress = RunProgress(**(saved["progress"] | {"seed": self.progress.seed, "recent_versions": versions}))
        set_position(self.scheduler, progress.num_optimizer_steps)
        return dataclasses.replace(self, progress=progress, metrics=saved["metrics"]).with_batches(saved)

    def with_batches(self, saved: Json) -> State:
        buffer, singles = (Entry(**entry) for entry in saved["buffer"]), (Row(*row) for row in saved["singles"])
        return dataclasses.replace(self, buffer=tuple(buffer), singles=tuple(singles))

    def _load_tensors(self, fill: Callable[[dict[str, Any]], None], *, has_critic: bool) -> None:
        tensors = self.tensors()
        if self.critic is not None and not has_critic:
            log.warning("the checkpoint has no critic: a new one is trained")
            tensors = {name: tensors[name] for name in TENSORS}
        fill(tensors)
        self.policy.load_shards(tensors["model"])
        set_optimizer_state_dict(self.policy.model, self.optimizer, tensors["optimizer"])
        if self.critic is not None and has_critic:
            self.critic.load_tensors(tensors)


class States:
    """Makes states; every process calls it in step."""

    def __init__(
        self, learner: PolicyAgent, checkpoints: Checkpoints, optimizer: OptimizerLike, config: TrainerSettings
    ) -> None:
        self._learner = learner
        self._checkpoints = checkpoints
        self._optimizer = optimizer
        self._config = config
        self.first: PolicyVersion | None = None
        """The adapter that the policy started from; None for the base model. `setup` sets it."""

    @property
    def first_version(self) -> int:
        """The version that a new run starts from; its state needs no checkpoint."""
        return 0 if self.first is None else self.first.version

    def policy_directory(self, version: int) -> Path:
        if self.first is not None and version == self.first.version:
            return Path(self.first.path)
        return self._checkpoints.policy_directory(version)

    def of_version(self, version: int | None, seed: int, *, reports_changes: bool = False) -> State:
        """Return the state of a published version, under the current settings; None is that of a new run.

        Raises:
            BadCheckpoint: Its state is not on disk, or does not fit the model.
            SettingsError: A setting changed that cannot change within a run.
        """
        if version is None or version == self.first_version:
            return self._first(seed)
        saved = self._read(version)
        check_resumable(saved.get("settings", {}), self._config)
        if reports_changes and self._learner.world.is_first:
            for name, before, now in _changes(saved.get("settings", {}), self._config):
                log.info("setting %s changed from %r to %r and takes effect now", name, before, now)
        group = self._learner.world.control_group
        return self._new(seed, with_weights=False).restored(
            saved, lambda tensors: self._checkpoints.read_tensors(version, tensors, group)
        )

    def rewound(self, state: State, to: Rewind) -> State:
        """Return the state to go on from an older version's weights; the counts of the run go on.

        Without a state of that very version, the newest state before it is taken.
        """
        known = [version for version in state.progress.recent_versions if version < to.version]
        version = self._learner.world.from_first(lambda: self._newest_with_state([*known, to.version], to.version))
        try:
            older = self.of_version(version, self._config.seed)
        except BadCheckpoint as error:
            log.error("%s, and version %d cannot be trained from: %s", to.reason, version, error)  # noqa: TRY400
            return state.with_progress(rewound_to=to.version)
        log.warning("%s: going back to version %d from version %d", to.reason, version, state.progress.policy_version)
        progress = dataclasses.replace(
            state.progress,
            policy_version=version,
            recent_versions=older.progress.recent_versions,
            rewound_to=to.version,
        )
        set_position(older.scheduler, progress.num_optimizer_steps)
        return dataclasses.replace(older, progress=progress, buffer=state.buffer, singles=state.singles)

    def with_missed(self, state: State, ledger: Ledger) -> State:
        """Return the state with the batches after it that made no version.

        They leave no checkpoint, so the ledger has them.
        """
        missed = self._learner.world.from_first(lambda: ledger.updates_after(state.progress.update_id))
        if missed:
            num_batches = state.progress.num_batches + len(missed)
            state = state.with_progress(num_batches=num_batches, update_id=missed[-1].update_id)
        kept = self._learner.world.from_first(ledger.kept_state)
        return state if kept is None else state.with_batches(kept)

    def moments_bytes(self) -> int:
        on_device = self._config.optimizer_state == "device"
        return 8 * sum(parameter.numel() for parameter in self._learner.parameters()) if on_device else 0

    def _first(self, seed: int) -> State:
        state = self._new(seed)
        if self.first is None:
            return state
        return state.with_progress(policy_version=self.first.version, recent_versions=(self.first.version,))

    def _new(self, seed: int, *, with_weights: bool = True) -> State:
        """Return the state of a new run, unless a saved state replaces its weights, and a fresh optimizer.

        A new run starts from the base model or from an adapter, which is the reference of the whole run.
        """
        self._learner.load(seed, with_weights=with_weights)
        if self.first is not None and (with_weights or self._learner.algorithm.needs_reference):
            self._learner.policy.load_adapter(Path(self.first.path))
            adapter = self._learner.policy.adapter
            self._learner.start = None if adapter is None else adapter.copied()
        optimizer = self._new_optimizer(self._learner.policy.parameters())
        critic = self._learner.critic
        if critic is not None:
            rate = self._learner.algorithm.critic_rate or 10 * self._config.learning_rate
            critic.bind(self._new_optimizer(critic.parameters()), rate)
        return State(
            progress=RunProgress(seed=seed),
            policy=self._learner.policy,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, self._config),
            critic=critic,
            adapter=self._learner.policy.adapter,
        )

    def _new_optimizer(self, parameters: list[Parameter]) -> torch.optim.Optimizer:
        if isinstance(self._optimizer, torch.optim.Optimizer):
            known = {key: value for key, value in self._optimizer.defaults.items() if key != "decoupled_weight_decay"}
            return type(self._optimizer)(parameters, **known)
        return self._optimizer(parameters)

    def _read(self, version: int) -> dict[str, Any]:
        def read() -> dict[str, Any] | BadCheckpoint:
            try:
                return self._checkpoints.read_state(version)
            except BadCheckpoint as error:
                return error

        found = self._learner.world.from_first(read)
        if isinstance(found, BadCheckpoint):
            raise found
        return found

    def _newest_with_state(self, known: Sequence[int], otherwise: int) -> int:
        held = [one for one in known if one == self.first_version or self._checkpoints.has_state(one)]
        return max(held, default=otherwise)


def make_scheduler(optimizer: torch.optim.Optimizer, rule: TrainerSettings) -> lr_scheduler.LambdaLR:
    """Return the schedule: a linear warm-up, then constant, linear to zero, or half a cosine to zero.

    The rate is a function of the count of updates alone, so a run can resume under another schedule or rate.
    """
    warmup = rule.num_warmup_updates
    if rule.schedule == "constant":
        return lr_scheduler.LambdaLR(optimizer, lambda update: min((update + 1) / (warmup + 1), 1.0))
    if rule.total_batches is None:
        raise SettingsError(f"schedule={rule.schedule!r} needs total_batches: set it, or use schedule='constant'")
    length = max(rule.total_batches * rule.num_minibatches * rule.reuse_epochs - warmup, 1)

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        done = min((update - warmup) / length, 1.0)
        return 1.0 - done if rule.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2

    return lr_scheduler.LambdaLR(optimizer, factor)


def set_position(scheduler: lr_scheduler.LambdaLR, num_updates: int) -> None:
    scheduler.last_epoch = num_updates
    groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    for group, rate, factor in groups:
        group["lr"] = rate * factor(num_updates)


def check_resumable(saved: Json, settings: TrainerSettings) -> None:
    """Check that the weights of a checkpoint can be trained on under these settings."""
    fixed = FIXED + (FIXED_FOR_LORA if settings.kind is PolicyKind.LORA else ())
    for name, before, now in _changes(saved, settings):
        if name in fixed:
            raise SettingsError(
                f"{name} was {before!r} and is {now!r} now, but a run cannot change it: set it back to {before!r}, or "
                "start a new run with another database and policies_dir"
            )


def _changes(saved: Json, settings: TrainerSettings) -> list[tuple[str, Any, Any]]:
    now = settings.saved()
    return [(name, before, now[name]) for name, before in saved.items() if name in now and now[name] != before]
