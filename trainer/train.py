"""Training, readable from top to bottom: `Training.step` is one batch from its claim to its acknowledgement.

All that changes is in the `State` that `setup` makes and `step` returns; a training itself keeps no state of the run.
So after a crash at any point, the run resumes from the last committed `State`, and the batch that was in progress is
repeated with the same random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from trainer.batch.advantages import moved_on
from trainer.batch.batch import trained_turns
from trainer.batch.ratios import finite
from trainer.batch.selection import Selection
from trainer.claims.claims import Claims
from trainer.claims.holds import Beside, Detour, Hold, own
from trainer.claims.ledger import ClaimedBatch
from trainer.model.agent import PolicyAgent
from trainer.model.heads import Head
from trainer.model.model import Policy, Whole
from trainer.model.optimizer import make_optimizer
from trainer.model.terms import Term
from trainer.publish.checkpoint import Checkpoints
from trainer.settings import TrainerSettings
from trainer.update import Updates, left_out_gauges
from trainer.versions.resume import OptimizerLike, States
from trainer.versions.state import Commits, NewVersion, State, probe_of
from turnwise.errors import BatchRefused
from turnwise.files import append_lines
from turnwise.types import Json, utc_now
from turnwise.types import Policy as NamedPolicy
from turnwise.version_directory import base_version, read_manifest

log = logging.getLogger(__name__)

Scalars = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What stands beside the core, in the order in which it is asked; by default nothing."""

    terms: tuple[type[Term], ...] = ()
    heads: tuple[Callable[[Policy], list[Head]], ...] = ()
    """Each makes what an algorithm needs beside a policy."""
    optimizer: Callable[[list[Parameter], TrainerSettings], torch.optim.Optimizer] = make_optimizer
    holds: tuple[type[Hold[Any]], ...] = ()
    beside: tuple[type[Beside[Any]], ...] = ()
    claims: tuple[type[Claims], ...] = ()
    """Claims that may stand in the place of the core's; the first one that is on does."""
    recorders: Callable[[TrainerSettings, NamedPolicy | None], list[Recorder]] = lambda *_: []
    """Makes a policy's recorders, besides the file in its directory, from its settings."""
    checks: tuple[Callable[[TrainerSettings], None], ...] = ()
    """What would stop a start, before anything is loaded; each raises SettingsError."""
    agent: type[PolicyAgent] = PolicyAgent
    place: Callable[[TrainerSettings], Whole] = lambda _: Whole()
    """Returns where the weights of a model are held."""
    leave: Callable[[], None] = lambda: None
    """Leaves what `place` has joined, at the end of the process."""


class Training:
    """One policy's training: its parts, and the loop over `step`."""

    def __init__(
        self,
        claims: Claims,
        learner: PolicyAgent,
        optimizer: OptimizerLike,
        *,
        settings: TrainerSettings,
        features: Features = Features(),
        first: dict[type[Beside[Any]], Beside[Any]] | None = None,
    ) -> None:
        """`first` is what stands beside the first policy of the process, which is added to; None for one alone."""
        self.claims = claims
        self.learner = learner
        self.settings = settings
        self.recorder = ChainRecorder([JsonLines(settings.policies_dir / "trainer.jsonl")])
        self.checkpoints = Checkpoints(settings.policies_dir, keep=settings.keep_versions)
        self.states = States(learner, self.checkpoints, optimizer, settings)
        first = {} if first is None else first
        self.beside: list[Beside[Any]] = []
        for kind in features.beside:
            if kind.is_on(settings):
                self.beside.append(kind(claims, learner, first))
                first.setdefault(kind, self.beside[-1])
        self.updates = Updates(claims, learner, self.beside)
        self._computing = own(self.beside, Beside.computing)
        self._why_unpublished = own(self.beside, Beside.why_unpublished)
        self._takes = own(self.beside, Beside.takes)
        kept = own(self.beside, Beside.kept_versions)
        self.commits = Commits(claims, learner, self.checkpoints, settings, kept)
        self.patience: float | None = None
        """Seconds to wait for a batch; None without an end, 0 where other policies train meanwhile."""

    def compile(self) -> None:
        self.learner.policy.compiled = True

    def setup(self, seed: int) -> State:
        """Return the state of the last committed batch, or that of a new run on an empty ledger.

        Raises:
            BadCheckpoint: The ledger names a version whose state is not on disk.
            SettingsError: A setting changed that cannot change within a run, or the directory of the versions belongs
                to another trainer or run.
        """
        world = self.learner.world
        if world.is_first:
            self.checkpoints.open()
        world.check_shared(self.checkpoints.directory)
        last = world.from_first(self.claims.last_update)
        self.states.first = world.from_first(self.claims.first_version)
        state = self.states.of_version(last.policy_version if last else None, seed, reports_changes=True)
        if world.is_first:
            self.checkpoints.discard_after(max(self.claims.newest_version(), last.policy_version if last else 0))
            self.claims.open(base_version(self.settings.model), state.progress.policy_version)
        present = self.states.policy_directory(state.progress.policy_version)
        probe = world.from_first(lambda: read_manifest(present).get("probe"))
        self.commits.start(state.progress.policy_version, probe)
        self.learner.find_room(is_new=last is None)
        for each in self.beside:
            each.opened(last.policy_version if last else 0, probe)
        if last is None:
            return state
        log.info("resuming after update %d at policy version %d", last.update_id, last.policy_version)
        return self.states.with_missed(state, self.claims)

    def step(self, state: State) -> tuple[Json, State]:
        """Train on one batch: claim, advantages, optimizer steps, publish, acknowledge; no gauges without one."""
        self.commits.settle()
        world = self.learner.world
        claimed = world.share(self.claims.next(state.progress, self.patience, state.kept) if world.is_first else None)
        if claimed is None:
            return {}, state
        if isinstance(claimed, Detour):
            return self.step(claimed.taken(self, state))
        if claimed.pinned is None:
            state = state.with_progress(rewound_to=None)
        if claimed.kept is not None:
            state = dataclasses.replace(state, kept=claimed.kept)
        if claimed.untrained is not None:
            return self.commits.finish_untrained(state, claimed, claimed.untrained, None)
        return self._train(state, *self.updates.refilled(claimed, state, self.patience))

    def learn(self, state: State) -> State:
        """Step until the configured end, or until the source is closed."""
        goes_on = True
        while goes_on and not self.is_done(state):
            goes_on, state = self.advance(state)
        self.commits.flush(state)
        return state

    def is_done(self, state: State) -> bool:
        return self.settings.total_batches is not None and state.progress.num_batches >= self.settings.total_batches

    def advance(self, state: State) -> tuple[bool, State]:
        metrics, state = self.step(state)
        if not metrics:
            return False, state
        done = state.progress.num_batches
        self._record(metrics, done)
        for each in self.beside:
            self._record(each.trained(state.progress, is_last=self.is_done(state)), done)
        return True, state

    def stop(self) -> None:
        """End the loop after the batch in progress, and an evaluation at once; safe in a signal handler."""
        self.claims.stop()

    def close(self) -> None:
        self.commits.close()
        self.learner.algorithm.close()
        for each in self.beside:
            each.close()
        self.claims.close()
        self.recorder.close()
        self.checkpoints.close()

    def _record(self, metrics: Json, step: int) -> None:
        if self.learner.world.is_first and metrics:
            self.recorder.write(metrics, step)

    def _train(self, state: State, claimed: ClaimedBatch, selection: Selection) -> tuple[Json, State]:
        started = time.monotonic()
        batch, metrics = self.updates.batch_of(claimed, selection, state)
        state = dataclasses.replace(state, singles=moved_on(state.singles, selection.single_values))
        if batch is None:
            return self._finish_untrained(state, claimed, metrics, selection)
        try:
            with contextlib.ExitStack() as around:
                for computing in self._computing:
                    around.enter_context(computing())
                batch, credit_gauges = self.updates.with_token_credit(batch, selection)
                self.commits.probe_base(state, selection.trained())
                num_steps, gauges = self.updates.take(state, claimed, batch, selection, self._record)
        except BatchRefused as error:
            log.error("batch %d refused: %s", state.progress.num_batches + 1, error)  # noqa: TRY400  no defect
            selection.refused = dict.fromkeys(claimed.group_keys, f"refused: {error}")
            return self._finish_untrained(state, claimed, metrics | {"refused": str(error)}, selection)
        metrics = metrics | gauges | credit_gauges
        if not num_steps:
            return self._finish_untrained(state, claimed, metrics, selection)
        self.learner.finish(metrics["num_groups"] - len(selection.refused), selection.refused.values())
        trained_at = time.monotonic()
        turn_ids = trained_turns(batch)
        metrics |= left_out_gauges(claimed, selection, turn_ids, self.learner.settings)
        metrics |= {"num_updates": num_steps, "seconds": trained_at - started}
        unpublished = None
        for why_unpublished in self._why_unpublished:
            gauges, why = why_unpublished(state.progress.policy_version)
            metrics |= gauges
            unpublished = unpublished or why
        version = self.commits.next_version(state)
        probe = self.commits.with_base(probe_of(state.policy, selection.trained()))
        weights = self.learner.policy.trained_state()
        made = NewVersion(
            version=version,
            weights=weights,
            probe=probe,
            is_held=any(takes(version, weights, probe) for takes in self._takes),
            trained_at=trained_at,
            trained=selection.advantages_by_session(turn_ids),
            unpublished=unpublished,
        )
        return self.commits.commit(state, claimed, selection, metrics, num_steps, made)

    def _finish_untrained(
        self, state: State, claimed: ClaimedBatch, metrics: Json, selection: Selection
    ) -> tuple[Json, State]:
        self.learner.finish(0, selection.refused.values())
        metrics = metrics | left_out_gauges(claimed, selection, (), self.learner.settings)
        return self.commits.finish_untrained(state, claimed, metrics, selection)


class Recorder(Protocol):
    """Records gauges."""

    def write(self, scalars: Scalars, step: int) -> None: ...

    def close(self) -> None: ...


class ChainRecorder:
    """Passes everything on to several recorders; one that fails does not stop the training or the others."""

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = list(recorders)
        self.num_lost = 0

    def write(self, scalars: Scalars, step: int) -> None:
        for recorder in self._recorders:
            try:
                recorder.write(scalars, step)
            except Exception as error:  # noqa: BLE001  a full disk, a network or anybody's code; the ledger has it too
                self.num_lost += 1
                lost = f"did not record step {step} ({self.num_lost} records are lost so far)"
                self._warn(recorder, lost, error)

    def add(self, recorder: Recorder) -> None:
        self._recorders.append(recorder)

    def close(self) -> None:
        """Close each of them; one that fails, as on a full disk, does not end the run with an error."""
        for recorder in self._recorders:
            try:
                recorder.close()
            except Exception as error:  # noqa: BLE001  a full disk, a network or anybody's code; the ledger has it too
                self._warn(recorder, "was not closed and may have lost its last records", error)

    def _warn(self, recorder: Recorder, what: str, error: Exception) -> None:
        log.warning("%s %s: %s: %s", type(recorder).__name__, what, type(error).__name__, error)


class JsonLines:
    """One JSON object a line. The file is open only while a line is written, so a crash loses no earlier line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, scalars: Scalars, step: int) -> None:
        named = {name: finite(value) if isinstance(value, float) else value for name, value in scalars.items()}
        line = {"at": utc_now().isoformat(), "step": step, **named}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self._path, [json.dumps(line, allow_nan=False, default=str)])

    def close(self) -> None: ...
