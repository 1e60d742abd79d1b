"""The states that training starts from: a new run, a restart, an older version after a rollback or a pin.

A checkpoint holds the settings that it was trained under. Most may change on a restart, and are logged; a few are
refused. The optimizer's settings are the current ones, never those of its saved state.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from trainer.build import OptimizerLike
from trainer.learning.optimizer import make_scheduler, set_position
from trainer.learning.singles import Row, moved_on
from trainer.pacing import Rewind
from trainer.policy.agent import PolicyAgent
from trainer.publish.checkpoint import Checkpoints
from trainer.settings import TrainerSettings
from trainer.source import LedgerSource
from trainer.state import Progress, State
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.types import Json, PolicyKind, PolicyVersion, UpdateRecord

log = logging.getLogger(__name__)

FIXED = ("kind",)
FIXED_FOR_LORA = ("model", "lora_rank", "lora_targets")
"""What the shape or the meaning of an adapter depends on."""


class States:
    """Makes states; every process calls it in step."""

    def __init__(
        self, agent: PolicyAgent, checkpoints: Checkpoints, optimizer: OptimizerLike, config: TrainerSettings
    ) -> None:
        self._agent = agent
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
        """Return where a version's files are."""
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
        if reports_changes and self._agent.world.is_first:
            log_changes(saved.get("settings", {}), self._config)
        group = self._agent.world.control_group
        return self._new(seed, with_weights=False).restored(
            saved, lambda tensors: self._checkpoints.read_tensors(version, tensors, group)
        )

    def rewound(self, state: State, to: Rewind) -> State:
        """Return the state to go on from an older version's weights; the counts of the run go on.

        Without a state of that very version, the newest state before it is taken.
        """
        known = [version for version in state.progress.recent_versions if version <= to.version]
        world = self._agent.world
        version = world.share(self._newest_with_state(known, to.version) if world.is_first else None)
        try:
            older = self.of_version(version, self._config.seed)
        except BadCheckpoint as error:
            log.error("%s, and version %d cannot be trained from: %s", to.reason, version, error)  # noqa: TRY400
            return state.with_progress(rewound_to=to.version)
        log.warning("%s: going back to version %d from version %d", to.reason, version, state.progress.policy_version)
        kept = tuple(before for before in known if before <= version)
        progress = dataclasses.replace(
            state.progress, policy_version=version, recent_versions=kept or (version,), rewound_to=to.version
        )
        set_position(older.scheduler, progress.num_optimizer_steps)
        return dataclasses.replace(older, progress=progress, buffer=state.buffer, singles=state.singles)

    def with_missed(self, state: State, env: LedgerSource) -> State:
        """Return the state with the batches after it that made no version: their count, and their single sessions.

        They leave no checkpoint, so the ledger has them.
        """
        world = self._agent.world
        missed: list[UpdateRecord]
        missed = world.share(env.updates_after(state.progress.update_id) if world.is_first else None)
        for update in missed:
            rows = [Row(*row) for row in update.metrics.get("singles", ())]
            state = dataclasses.replace(state, singles=moved_on(state.singles, rows)).with_progress(
                num_batches=state.progress.num_batches + 1, update_id=update.update_id
            )
        return state

    def moments_bytes(self) -> int:
        """Return the bytes beside the weights that a new optimizer allocates in its first step."""
        on_device = self._config.optimizer_state == "device"
        return 8 * sum(parameter.numel() for parameter in self._agent.parameters()) if on_device else 0

    def _first(self, seed: int) -> State:
        """Return the state of a run without a version."""
        state = self._new(seed)
        if self.first is None:
            return state
        self._agent.policy.load_adapter(Path(self.first.path))
        return state.with_progress(policy_version=self.first.version, recent_versions=(self.first.version,))

    def _new(self, seed: int, *, with_weights: bool = True) -> State:
        """Return the state of a new run: the base model, unless a saved state replaces it, and a fresh optimizer."""
        self._agent.load(seed, with_weights=with_weights)
        optimizer = self._new_optimizer(self._agent.policy.parameters())
        critic = self._agent.critic
        if critic is not None:
            rate = self._agent.algorithm.critic_rate or 10 * self._config.learning_rate
            critic.bind(self._new_optimizer(critic.parameters()), rate)
        return State(
            progress=Progress(seed=seed),
            policy=self._agent.policy,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, self._config),
            critic=critic,
            adapter=self._agent.policy.adapter,
        )

    def _new_optimizer(self, parameters: list[Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters: `setup` loads them again, so a bound one cannot be kept."""
        if isinstance(self._optimizer, torch.optim.Optimizer):
            known = {key: value for key, value in self._optimizer.defaults.items() if key != "decoupled_weight_decay"}
            return type(self._optimizer)(parameters, **known)
        return self._optimizer(parameters)

    def _read(self, version: int) -> dict[str, Any]:
        """Read the plain values of a version's state in the first process, for all; each reads its own tensors."""
        world = self._agent.world
        saved: dict[str, Any] | BadCheckpoint | None = None
        if world.is_first:
            try:
                saved = self._checkpoints.read_state(version)
            except BadCheckpoint as error:
                saved = error
        found: dict[str, Any] | BadCheckpoint = world.share(saved)
        if isinstance(found, BadCheckpoint):
            raise found
        return found

    def _newest_with_state(self, known: Sequence[int], otherwise: int) -> int:
        """Return the newest of these versions that can be resumed from."""
        held = [one for one in known if one == self.first_version or self._checkpoints.has_state(one)]
        return max(held, default=otherwise)


def check_resumable(saved: Json, settings: TrainerSettings) -> None:
    """Check that the weights of a checkpoint can be trained on under these settings.

    Raises:
        SettingsError: A setting changed that the weights depend on.
    """
    fixed = FIXED + (FIXED_FOR_LORA if settings.kind is PolicyKind.LORA else ())
    for name, before, now in _changes(saved, settings):
        if name in fixed:
            raise SettingsError(
                f"{name} was {before!r} and is {now!r} now, but a run cannot change it: set it back to {before!r}, or "
                "start a new run with another database and policies_dir"
            )


def log_changes(saved: Json, settings: TrainerSettings) -> None:
    """Log each setting that changed since the checkpoint was written."""
    for name, before, now in _changes(saved, settings):
        log.info("setting %s changed from %r to %r and takes effect now", name, before, now)


def _changes(saved: Json, settings: TrainerSettings) -> list[tuple[str, Any, Any]]:
    now = settings.saved()
    return [(name, before, now[name]) for name, before in saved.items() if name in now and now[name] != before]
