"""Training, readable from top to bottom: `Training.step` is one batch from its claim to its acknowledgement.

All that changes is in the `State` that `setup` makes and `step` returns; a training itself keeps no state of the run.
So after a crash at any point, the run resumes from the last committed `State`, and the batch that was in progress is
repeated with the same random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.batch.advantages import moved_on
from trainer.batch.batch import trained_turns
from trainer.batch.ratios import finite
from trainer.batch.selection import Selection
from trainer.checks.gap import GapCheck
from trainer.claims.claims import Claims
from trainer.claims.holds import Hold, PublishingGate, Rewind
from trainer.claims.ledger import ClaimedBatch, StopFlag, UpdateIds
from trainer.evaluate import Evaluator
from trainer.model.agent import PolicyAgent
from trainer.model.critic import Critic
from trainer.model.heads import Head, Reference
from trainer.model.model import Policy, Whole
from trainer.model.optimizer import make_optimizer
from trainer.model.terms import Term
from trainer.publish.checkpoint import Checkpoints
from trainer.publish.weight_server import WeightServer
from trainer.replay import ReplayBuffer
from trainer.settings import TrainerSettings
from trainer.update import Updates, left_out_gauges
from trainer.versions.starts import OptimizerLike, States
from trainer.versions.state import Commits, NewVersion, State, probe_of
from turnwise.errors import BatchRefused
from turnwise.files import append_lines
from turnwise.store.database import Database
from turnwise.types import Json, PolicyKind, utc_now
from turnwise.types import Policy as NamedPolicy
from turnwise.version_directory import base_version, read_manifest

log = logging.getLogger(__name__)

Scalars = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What stands beside the core, in the order in which it is asked; by default nothing."""

    terms: tuple[type[Term], ...] = ()
    holds: tuple[type[Hold], ...] = ()
    gates: tuple[type[PublishingGate], ...] = ()
    agent: type[PolicyAgent] = PolicyAgent
    place: Callable[[TrainerSettings], Whole] = lambda _: Whole()
    """Returns where the weights of a model are held."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts that the policies of one process share."""

    db: Database
    model: Policy
    """They train adapters of it, in turns (`State.enter`)."""
    update_ids: UpdateIds | None = None
    stopped: StopFlag | None = None
    """Both None for one policy alone."""


Parts = tuple[Claims, PolicyAgent, OptimizerLike, Evaluator, *tuple[ReplayBuffer, ...]]
"""The parts of a training, in the order in which a workflow takes them; nothing is loaded yet."""


def make_parts(
    settings: TrainerSettings,
    policy: NamedPolicy | None = None,
    shared: Shared | None = None,
    *,
    has_buffer: bool,
    features: Features = Features(),
) -> Parts:
    """Make the parts of a policy's training from its settings."""
    shared = shared or Shared(db=Database(settings.database.get_secret_value()), model=Policy(settings, features.terms))
    claims = Claims(
        shared.db,
        settings,
        with_imported=not has_buffer and not settings.algorithm.needs_behaviour,
        is_paced=not has_buffer,
        policy=policy,
        update_ids=shared.update_ids,
        stopped=shared.stopped,
        terms=shared.model.terms,
        holds=features.holds,
    )
    heads: list[Head] = []
    if settings.algorithm.needs_reference:
        own = Policy(settings, features.terms) if settings.kind is PolicyKind.FULL else None
        heads.append(Reference(shared.model, own))
    if settings.algorithm.needs_values:
        heads.append(Critic(shared.model))
    learner = features.agent(shared.model, settings, heads)
    buffers = [ReplayBuffer(claims, settings)] if has_buffer else []
    return claims, learner, functools.partial(make_optimizer, settings=settings), Evaluator(claims, settings), *buffers


class Training:
    """One policy's training: its parts, and the loop over `step`."""

    def __init__(
        self,
        claims: Claims,
        learner: PolicyAgent,
        optimizer: OptimizerLike,
        evaluator: Evaluator | None,
        buffer: ReplayBuffer | None = None,
        *,
        settings: TrainerSettings,
        features: Features = Features(),
    ) -> None:
        """Put claimed groups into the buffer, and sample batches from it; None trains the claimed groups themselves."""
        is_sample = buffer is not None
        self.claims = claims
        self.learner = learner
        self.optimizer = optimizer
        self.evaluator = evaluator
        self.buffer = buffer
        self.settings = settings
        self.recorder = ChainRecorder([JsonLines(settings.policies_dir / "trainer.jsonl")])
        self.checkpoints = Checkpoints(settings.policies_dir, keep=settings.keep_versions)
        self.states = States(learner, self.checkpoints, optimizer, settings)
        gap_check = GapCheck(learner, self.checkpoints, settings)
        self.updates = Updates(self.claims, learner, gap_check, is_sample=is_sample)
        self.gates = [gate(claims, learner) for gate in features.gates if gate.is_on(settings)]
        self.commits = Commits(self.claims, learner, self.checkpoints, settings, keeps_refused=is_sample)
        self.weights: WeightServer | None = None
        """Hands weights to engines; None where they read directories. In the first process alone."""
        self.patience: float | None = None
        """Seconds to wait for a batch; None without an end, 0 where other policies train meanwhile."""

    def compile(self) -> None:
        self.learner.policy.compiled = True

    def setup(self, seed: int) -> State:
        """Return the state of the last committed batch, or that of a new run on an empty ledger.

        Raises:
            BadCheckpoint: The ledger names a version whose state is not on disk.
            SettingsError: A setting changed that cannot change within a run, or the directory of the versions belongs
                to another trainer or run, or is not the same one for all processes.
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
            self._serve_weights()
        probe = read_manifest(self.states.policy_directory(state.progress.policy_version)).get("probe")
        self.commits.start(state.progress.policy_version, probe)
        self.learner.find_room(is_new=last is None)
        if last is None:
            return state
        log.info("resuming after update %d at policy version %d", last.update_id, last.policy_version)
        if last.policy_version and self._sends_weights:
            self._hold(last.policy_version, self.learner.policy.trained_state(), probe)
        return self.states.with_missed(state, self.claims)

    def step(self, state: State) -> tuple[Json, State]:
        """Train on one batch: claim, advantages, optimizer steps, gate, publish, acknowledge; no gauges without one.

        With a replay buffer the claimed groups move into it, and once it holds enough, a sample of it is trained. The
        claim is acked with the update, so each group enters the buffer exactly once. A sampled group that left the
        ledger's claims long ago is only read again.
        """
        self.commits.settle()
        world = self.learner.world
        claimed = world.share(self.claims.next(state.progress, self.patience) if world.is_first else None)
        if claimed is None:
            return {}, state
        if isinstance(claimed, Rewind):
            return self.step(self._rewound(state, claimed))
        if claimed.pinned is None:
            state = state.with_progress(rewound_to=None)
        if self.buffer is None:
            return self._train(state, *self.updates.refilled(claimed, state, self.patience))
        state = dataclasses.replace(state, buffer=self.buffer.add(state.buffer, claimed))
        if not self.buffer.can_sample(state.buffer):
            metrics = {"num_buffered_groups": len(state.buffer)}
            return self.commits.finish_untrained(state, claimed, metrics, None)
        pks, buffer = self.buffer.sample(state.buffer, self.settings.groups_per_batch, state.rng())
        state = dataclasses.replace(state, buffer=buffer)
        sampled = dataclasses.replace(claimed, experiences=self.buffer.read(buffer, pks))
        return self._train(state, sampled, self.updates.select(sampled, state))

    def _rewound(self, state: State, to: Rewind) -> State:
        self.commits.finish_writing()  # the state to go back to may be among what is written now
        state = self.states.rewound(state, to)
        self.commits.go_back(state.progress.policy_version)
        return state

    def evaluate(self, state: State) -> tuple[Json, State]:
        if self.evaluator is None or not self.learner.world.is_first:
            return {}, state
        return self.evaluator.evaluate(state.progress.policy_version), state

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
        every = self.settings.evaluate_every
        if every is not None and (done % every == 0 or self.is_done(state)):
            metrics, state = self.evaluate(state)
            self._record({f"eval/{name}": value for name, value in metrics.items()}, done)
        return True, state

    def stop(self) -> None:
        """End the loop after the batch in progress, and an evaluation at once; safe in a signal handler."""
        self.claims.stop()

    def close(self) -> None:
        self.commits.close()
        self.learner.algorithm.close()
        if self.weights is not None:
            self.claims.announce_weights(None)
            self.weights.close()
        self.claims.close()
        self.recorder.close()
        self.checkpoints.close()

    def _serve_weights(self) -> None:
        if self.weights is not None:
            return
        if self._sends_weights or self.settings.engine_sleep_level:
            self.weights = WeightServer(self.settings)
        self.claims.announce_weights(None if self.weights is None else self.weights.url)

    @contextlib.contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Let engines on the same GPU sleep for the block, in which the trainer computes."""
        if not self.settings.engine_sleep_level:
            yield
            return
        with contextlib.nullcontext() if self.weights is None else self.weights.engines_asleep():
            self.learner.world.from_first(lambda: None)  # the other processes wait for the first one
            try:
                yield
            finally:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    @property
    def _sends_weights(self) -> bool:
        return self.settings.weight_transfer and self.settings.kind is PolicyKind.FULL

    def _hold(self, version: int, weights: dict[str, Tensor], probe: Json | None) -> bool:
        if self.weights is None or not self._sends_weights:
            return False
        is_held = self.weights.held.hold(version, self.learner.policy.published(weights), probe)
        if not is_held:
            log.error("version %d has weights that are not finite; engines will refuse its directory", version)
        return is_held

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
            with self._engines_asleep():
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
        refusal = None
        for gate in self.gates:
            gauges, why = gate.why_unpublished(state.progress.policy_version)
            metrics |= gauges
            refusal = refusal or why
        version = self.commits.next_version(state)
        probe = self.commits.with_base(probe_of(state.policy, selection.trained()))
        weights = self.learner.policy.trained_state()
        made = NewVersion(
            version=version,
            weights=weights,
            probe=probe,
            is_held=self._hold(version, weights, probe),
            trained_at=trained_at,
            trained=selection.advantages_by_session(turn_ids),
            refusal=refusal,
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
