"""Training, readable from top to bottom: `OnPolicyWorkflow.step` is one batch from its claim to its acknowledgement.

All that changes is in the `State` that `setup` makes and `step` returns; a workflow itself keeps no state of the run.
So after a crash at any point, the run resumes from the last committed `State`, and the batch that was in progress is
repeated with the same random numbers.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from trainer.batch.advantages import moved_on
from trainer.batch.batch import trained_turns
from trainer.batch.selection import TOO_LONG, Selection
from trainer.build import OptimizerLike, Shared, as_settings, make_agent, make_evaluator, make_source, optimizer_factory
from trainer.claims import Claims, group_keys, left_out_gauges, num_minibatches
from trainer.commit import Commits, NewVersion, probe_of
from trainer.evaluate import Evaluator
from trainer.gap_check import GapCheck
from trainer.gate import Gate
from trainer.ledger import ClaimedBatch
from trainer.model.agent import PolicyAgent
from trainer.model.memory import OUT_OF_MEMORY, MemoryLimits, OutOfMemory, note_out_of_memory, read_limits
from trainer.pacing import Rewind
from trainer.parallel import join_world
from trainer.publish.checkpoint import Checkpoints, check_shared
from trainer.publish.weight_server import WeightServer
from trainer.recorders import ChainRecorder, JsonLines, Recorder
from trainer.settings import TrainerSettings
from trainer.source import LedgerSource
from trainer.state import State, States
from trainer.update import FittingGroups, Updates
from turnwise.errors import BatchRefused
from turnwise.types import Json, PolicyKind
from turnwise.types import Policy as NamedPolicy
from turnwise.version_directory import base_version, read_manifest

log = logging.getLogger(__name__)


class RLWorkflow(abc.ABC):
    """What every workflow is: five parts, a `State`, and the loop over `step`."""

    has_buffer = False
    """Whether claimed groups go into a replay buffer, from which batches are sampled."""

    def __init__(
        self,
        env: LedgerSource,
        agent: PolicyAgent,
        optimizer: OptimizerLike,
        evaluator: Evaluator | None,
        config: TrainerSettings | Mapping[str, Any],
    ) -> None:
        self.env = env
        self.agent = agent
        self.optimizer = optimizer
        self.evaluator = evaluator
        self.config = as_settings(config)
        self.recorder = ChainRecorder([])
        self.checkpoints = Checkpoints(self.config.policies_dir, keep=self.config.keep_versions)
        self.states = States(agent, self.checkpoints, optimizer, self.config)
        self.claims = Claims(env, agent, self.config, is_sample=self.has_buffer)
        self.updates = Updates(agent, GapCheck(agent, self.checkpoints, self.config), self.config)
        self.gate = Gate(env, agent, self.config) if self.config.gate_sessions else None
        self.commits = Commits(env, agent, self.checkpoints, self.config, keeps_refused=self.has_buffer)
        self._fitting = FittingGroups()
        self._too_large: tuple[str, ...] = (OUT_OF_MEMORY,)
        """How reasons begin for which groups are left out that do not fit into memory."""
        self.weights: WeightServer | None = None
        """Hands weights to engines; None where they read directories. In the first process alone."""

    @classmethod
    def name(cls) -> str:
        """Return the workflow's name for logs."""
        return cls.__name__

    @classmethod
    def build_from_config(
        cls,
        config: TrainerSettings | Mapping[str, Any],
        enable_multi_devices: bool = False,
        enable_jit: bool = True,
        *,
        policy: NamedPolicy | None = None,
        shared: Shared | None = None,
    ) -> Self:
        """Return a workflow over the ledger that the config names, of the default policy or of a named one."""
        settings = as_settings(config)
        workflow = cls._build(settings, policy, shared)
        workflow.add_recorders([JsonLines(settings.policies_dir / "trainer.jsonl")])
        if enable_multi_devices:
            workflow.enable_multi_devices()
        if enable_jit:
            workflow.enable_jit()
        return workflow

    @classmethod
    @abc.abstractmethod
    def _build(cls, settings: TrainerSettings, policy: NamedPolicy | None, shared: Shared | None) -> Self:
        """Return a workflow from its resolved settings."""

    def add_recorders(self, recorders: Sequence[Recorder]) -> None:
        """Record with these too."""
        for recorder in recorders:
            self.recorder.add(recorder)

    def enable_jit(self) -> None:
        """Compile this instance's layers with `torch.compile`; before `setup`."""
        self.agent.policy.compiled = True

    def enable_multi_devices(self) -> None:
        """Train with all processes that `torchrun` started; before `setup`."""
        self.agent.world = join_world()
        self.enable_shmap("data")

    def enable_shmap(self, axis_name: str) -> None:
        self.agent.shard(axis_name)

    def setup(self, seed: int) -> State:
        """Return the state of the last committed batch, or that of a new run on an empty ledger.

        Raises:
            BadCheckpoint: The ledger names a version whose state is not on disk.
            SettingsError: A setting changed that cannot change within a run, or the directory of the versions belongs
                to another trainer or run, or is not the same one for all processes.
        """
        world = self.agent.world
        if world.is_first:
            self.checkpoints.open()
        check_shared(self.checkpoints, world)
        self._apply_memory_limits(world.from_first(lambda: read_limits(self.config.policies_dir)))
        last = world.from_first(self.env.last_update)
        self.states.first = world.from_first(self.env.first_version)
        state = self.states.of_version(last.policy_version if last else None, seed, reports_changes=True)
        if world.is_first:
            self.checkpoints.discard_after(max(self.env.newest_version(), last.policy_version if last else 0))
            self.env.open(base_version(self.config.model), state.progress.policy_version)
            self._serve_weights()
        probe = read_manifest(self.states.policy_directory(state.progress.policy_version)).get("probe")
        self.commits.start(state.progress.policy_version, probe)
        self.agent.find_row_tokens(0 if last else self.states.moments_bytes())
        if last is None:
            return self._post_setup(state)
        log.info("resuming after update %d at policy version %d", last.update_id, last.policy_version)
        if last.policy_version and self._sends_weights:
            self._hold(last.policy_version, self.agent.export(), probe)
        return self._post_setup(self.states.with_missed(state, self.env))

    @abc.abstractmethod
    def step(self, state: State) -> tuple[Json, State]:
        """Train on one batch; return its gauges, empty when the source had none."""

    def evaluate(self, state: State) -> tuple[Json, State]:
        """Measure the served policy on held-out tasks."""
        if self.evaluator is None or not self.agent.world.is_first:
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
        """Return whether the configured end is reached."""
        return self.config.total_batches is not None and state.progress.num_batches >= self.config.total_batches

    def advance(self, state: State) -> tuple[bool, State]:
        """Step, record, and evaluate if it is time; return whether there was a batch."""
        metrics, state = self.step(state)
        if not metrics:
            return False, state
        done = state.progress.num_batches
        self._record(metrics, done)
        every = self.config.evaluate_every
        if every is not None and (done % every == 0 or self.is_done(state)):
            metrics, state = self.evaluate(state)
            self._record({f"eval/{name}": value for name, value in metrics.items()}, done)
        return True, state

    def stop(self) -> None:
        """End the loop after the batch in progress, and an evaluation at once; safe in a signal handler."""
        self.env.stop()

    def close(self) -> None:
        """Release what is held, and flush."""
        self.commits.close()
        self.agent.algorithm.close()
        if self.weights is not None:
            self.env.announce_weights(None)
            self.weights.close()
        self.env.close()
        self.recorder.close()
        self.checkpoints.close()

    def _post_setup(self, state: State) -> State:
        return state

    def _apply_memory_limits(self, limits: MemoryLimits) -> None:
        """Avoid what did not fit into memory before a restart."""
        self.agent.save_memory(limits)
        longest, wanted = limits.chain_tokens, self.config.max_chain_tokens
        if longest is not None and (wanted is None or longest < wanted):
            self.config = self.claims.config = self.config.model_copy(update={"max_chain_tokens": longest})
            self._too_large = (OUT_OF_MEMORY, TOO_LONG)

    def _serve_weights(self) -> None:
        """Hand weights to engines from memory, and tell the proxy where."""
        if self.weights is not None:
            return
        if self._sends_weights or self.config.engine_sleep_level:
            self.weights = WeightServer(self.config)
        self.env.announce_weights(None if self.weights is None else self.weights.url)

    @contextlib.contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Let engines on the same GPU sleep for the block, in which the trainer computes."""
        if not self.config.engine_sleep_level:
            yield
            return
        with contextlib.nullcontext() if self.weights is None else self.weights.engines_asleep():
            self.agent.world.from_first(lambda: None)  # the other processes wait for the first one
            try:
                yield
            finally:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    @property
    def _sends_weights(self) -> bool:
        return self.config.weight_transfer and self.config.kind is PolicyKind.FULL

    def _hold(self, version: int, weights: dict[str, Tensor], probe: Json | None) -> bool:
        """Keep a version's weights in memory for engines, in the first process; return whether they are there."""
        if self.weights is None or not self._sends_weights:
            return False
        is_held = self.weights.held.hold(version, self.agent.policy.published(weights), probe)
        if not is_held:
            log.error("version %d has weights that are not finite; engines will refuse its directory", version)
        return is_held

    def _record(self, metrics: Json, step: int) -> None:
        if self.agent.world.is_first and metrics:
            self.recorder.write(metrics, step)


class OnPolicyWorkflow(RLWorkflow):
    """Claims rewarded groups, trains on them, publishes a version, and acknowledges them."""

    @classmethod
    def _build(cls, settings: TrainerSettings, policy: NamedPolicy | None, shared: Shared | None) -> Self:
        source = make_source(settings, policy, shared, with_imported=not settings.algorithm.needs_behaviour)
        evaluator = make_evaluator(settings, source)
        return cls(source, make_agent(settings, shared), optimizer_factory(settings), evaluator, settings)

    def step(self, state: State) -> tuple[Json, State]:
        """Train on one claimed batch: claim, advantages, optimizer steps, gate, publish, acknowledge."""
        claimed, state = self._next_batch(state)
        if claimed is None:
            return {}, state
        return self._train(state, self.claims.refilled(claimed, state))

    def _next_batch(self, state: State) -> tuple[ClaimedBatch | None, State]:
        """Return the next batch, and the state to train it from: the source may ask to go back to another version."""
        claimed = self._claim(state)
        while isinstance(claimed, Rewind):
            self.commits.finish_writing()  # the state to go back to may be among what is written now
            state = self.states.rewound(state, claimed)
            self.commits.go_back(state.progress.policy_version)
            claimed = self._claim(state)
        if claimed is not None and claimed.pinned is None:
            state = state.with_progress(rewound_to=None)
        return claimed, state

    def _claim(self, state: State) -> ClaimedBatch | Rewind | None:
        self.commits.settle()
        return self.claims.next(state)

    def _train(self, state: State, claimed: ClaimedBatch) -> tuple[Json, State]:
        """Train on a batch's experiences and finish its claim."""
        try:
            return self._trained(state, claimed, time.monotonic())
        except OutOfMemory as error:  # of one of several processes: they all end, and are started again
            note_out_of_memory(self.config.policies_dir, error, is_pairs=self.agent.algorithm.trains_pairs)
            raise

    def _trained(self, state: State, claimed: ClaimedBatch, started: float) -> tuple[Json, State]:
        chosen, num_imported, metrics = self.claims.selected(claimed, state)
        state = dataclasses.replace(state, singles=moved_on(state.singles, chosen.single_rows))
        if not chosen.experiences:
            return self._finish_untrained(state, claimed, metrics, chosen)
        batch = self.claims.batch_of(chosen, num_imported, state)
        try:
            with self._engines_asleep():
                credited = self.updates.with_token_credit(batch, chosen)
                self.commits.probe_base(state, credited.trainable())
                count = num_minibatches(claimed, credited.batch, self.config)
                done = self.updates.take(state, credited, count, self._record)
        except BatchRefused as error:
            log.error("batch %d refused: %s", state.progress.num_batches + 1, error)  # noqa: TRY400  no defect
            chosen = dataclasses.replace(chosen, refused=dict.fromkeys(group_keys(claimed), f"refused: {error}"))
            return self._finish_untrained(state, claimed, metrics | {"refused": str(error)}, chosen)
        chosen, metrics = done.chosen, metrics | done.gauges
        if not done.num_steps:
            return self._finish_untrained(state, claimed, metrics, chosen)
        self._fitting.observe(metrics["num_groups"] - len(chosen.refused), chosen.refused.values(), self._too_large)
        trained_at = time.monotonic()
        turn_ids = trained_turns(credited.batch)
        metrics |= left_out_gauges(claimed, chosen, turn_ids, self.config)
        metrics |= {"num_updates": done.num_steps, "seconds": trained_at - started}
        refusal = None
        if self.gate is not None:
            gate = self.gate.check(state.progress.policy_version)
            metrics, refusal = metrics | gate.gauges, gate.reason
        version = self.commits.next_version(state)
        probe = self.commits.with_base(probe_of(state.policy, chosen.experiences))
        weights = self.agent.export()
        made = NewVersion(
            version=version,
            weights=weights,
            probe=probe,
            is_held=self._hold(version, weights, probe),
            trained_at=trained_at,
            trained=chosen.advantages_by_session(turn_ids),
            refusal=refusal,
        )
        return self.commits.commit(state, claimed, chosen, metrics, done.num_steps, made)

    def _finish_untrained(
        self, state: State, claimed: ClaimedBatch, metrics: Json, chosen: Selection
    ) -> tuple[Json, State]:
        """Drop the groups with their reasons, unless nearly all of the latest ones do not fit into memory."""
        self._fitting.observe(0, chosen.refused.values(), self._too_large)
        return self.commits.finish_untrained(state, claimed, metrics, chosen)
