"""What training starts from: a new run, or a restart, after which some settings may have changed.

A checkpoint holds the settings that it was trained under. Most may change on a restart, and are logged; a few are
refused. The optimizer's settings are the current ones, never those of its saved state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from trainer.claims.ledger import Ledger, RunProgress
from trainer.model.agent import PolicyAgent, Schedule
from trainer.model.loading import load_adapter
from trainer.publish.checkpoint import Checkpoints
from trainer.settings import TrainerSettings
from trainer.versions.state import State
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.types import Json, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

OptimizerLike = torch.optim.Optimizer | Callable[[list[Parameter]], torch.optim.Optimizer]
FIXED = ("kind",)
FIXED_FOR_LORA = ("model", "lora_rank", "lora_targets")


class States:
    """Makes states; every process calls it in step."""

    def __init__(
        self, learner: PolicyAgent, checkpoints: Checkpoints, optimizer: OptimizerLike, settings: TrainerSettings
    ) -> None:
        self._learner = learner
        self._checkpoints = checkpoints
        self._optimizer = optimizer
        self._settings = settings
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
        check_resumable(saved.get("settings", {}), self._settings)
        if reports_changes and self._learner.world.is_first:
            for name, before, now in _changes(saved.get("settings", {}), self._settings):
                log.info("setting %s changed from %r to %r and takes effect now", name, before, now)
        return self._new(seed, with_weights=False).restored(
            saved, lambda tensors: self._checkpoints.read_tensors(version, tensors, self._learner.world)
        )

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
        if self.first is not None and (with_weights or self._learner.heads):
            load_adapter(self._learner.policy.model, Path(self.first.path))
            for head in self._learner.heads:
                head.start = None if self._learner.policy.adapter is None else self._learner.policy.adapter.copied()
        optimizer = self._new_optimizer(self._learner.policy.parameters())
        for head in self._learner.heads:
            head.bind(self._new_optimizer, self._settings.learning_rate)
        return State(
            progress=RunProgress(seed=seed),
            policy=self._learner.policy,
            optimizer=optimizer,
            schedule=Schedule(optimizer, self._settings),
            heads=self._learner.heads,
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

    def newest_with_state(self, known: Sequence[int], otherwise: int) -> int:
        held = [one for one in known if one == self.first_version or self._checkpoints.has_state(one)]
        return max(held, default=otherwise)


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
