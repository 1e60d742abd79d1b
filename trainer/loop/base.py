"""What every workflow has: five parts, a `State`, and the loop over `step`.

Everything that changes is in the `State` that `setup` makes and `step` returns; a workflow itself keeps
no state of the run. So after a crash at any point, the run resumes from the last committed `State`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.nn import Parameter

from trainer.build import OptimizerLike, as_settings
from trainer.learning.optimizer import make_scheduler, set_position
from trainer.loop.commits import Commits
from trainer.loop.evaluator import Evaluator, LedgerEvaluator
from trainer.loop.gap_check import GapCheck
from trainer.loop.imported import ImportedSessions
from trainer.loop.resume import check_resumable, log_changes, saved_settings
from trainer.loop.state import TENSORS, Progress, State
from trainer.loop.token_credit import TokenCredit
from trainer.pacing import Rewind
from trainer.parallel import join_world
from trainer.policy.agent import PolicyAgent
from trainer.policy.memory_limits import MemoryLimits, read_limits
from trainer.publish import directory
from trainer.publish.checkpoint import Checkpoints
from trainer.publish.weight_server import WeightServer
from trainer.recorders import ChainRecorder, JsonLines, Recorder
from trainer.settings import TrainerSettings
from trainer.source import Source
from turnwise.errors import BadCheckpoint
from turnwise.types import Json, PolicyKind, UpdateRecord
from turnwise.version_directory import read_manifest

log = logging.getLogger(__name__)


class RLWorkflow(abc.ABC):
    """What every workflow is: five parts, a `State`, and the loop over `step`."""

    def __init__(
        self,
        env: Source,
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
        self.commits = Commits(env, self.checkpoints, self.config.checkpoint_every)
        self.token_credit = TokenCredit(agent, self.config)
        self.imported = ImportedSessions(env, self.config)
        self.gap_check = GapCheck(agent, self.checkpoints, self.config)
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
    ) -> Self:
        """Return a workflow over the ledger that the config names."""
        settings = as_settings(config)
        workflow = cls._build(settings)
        workflow.add_recorders([JsonLines(settings.log_path or settings.policies_dir / "trainer.jsonl")])
        if enable_multi_devices:
            workflow.enable_multi_devices()
        if enable_jit:
            workflow.enable_jit()
        return workflow

    @classmethod
    @abc.abstractmethod
    def _build(cls, settings: TrainerSettings) -> Self:
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
        """Shard this instance's policy with FSDP2 over a device mesh whose dimension has this name; before `setup`."""
        self.agent.shard(axis_name)

    def setup(self, seed: int) -> State:
        """Return the state of the last committed batch, or that of a new run on an empty ledger.

        Raises:
            BadCheckpoint: The ledger names a version whose state is not on disk.
            SettingsError: A setting changed that cannot change within a run, or the directory of the versions belongs
                to another trainer or run.
        """
        world = self.agent.world
        if world.is_first:
            self.checkpoints.open()
        self._apply_memory_limits(world.share(read_limits(self.config.policies_dir) if world.is_first else None))
        last: UpdateRecord | None = world.share(self.env.last_update() if world.is_first else None)
        state = self._state_of(last.policy_version if last else 0, seed, reports_changes=True)
        if world.is_first:
            self.checkpoints.discard_after(max(self.env.newest_version(), last.policy_version if last else 0))
            self.env.open(directory.base_version(self.config.model))
            self._serve_weights()
        self.commits.start(world, last.policy_version if last else 0)
        self.agent.find_row_tokens(0 if last else self._moments_bytes())
        if last is None:
            return self._post_setup(state)
        log.info("resuming after batch %d at policy version %d", last.update_id, last.policy_version)
        if last.policy_version:
            place = self.checkpoints.policy_directory(last.policy_version)
            self._hold(state, last.policy_version, read_manifest(place).get("probe"))
        if "buffer" in last.metrics:
            state = dataclasses.replace(state, buffer=last.metrics["buffer"])
        # Refused batches leave no checkpoint; the ledger's count includes them.
        return self._post_setup(state.with_progress(num_batches=last.update_id))

    @abc.abstractmethod
    def step(self, state: State) -> tuple[Json, State]:
        """Train on one batch; return its gauges, empty when the source was closed."""

    def evaluate(self, state: State) -> tuple[Json, State]:
        """Measure the served policy on held-out tasks."""
        if self.evaluator is None or not self.agent.world.is_first:
            return {}, state
        return self.evaluator.evaluate(state.progress.policy_version), state

    def learn(self, state: State) -> State:
        """Step until the configured end, or until the source is closed."""
        total = self.config.total_batches
        while total is None or state.progress.num_batches < total:
            metrics, state = self.step(state)
            if not metrics:
                break
            done = state.progress.num_batches
            self._record(metrics, done)
            every = self.config.evaluate_every
            if every is not None and (done % every == 0 or done == total):
                metrics, state = self.evaluate(state)
                self._record({f"eval/{name}": value for name, value in metrics.items()}, done)
        self.commits.flush(state, saved_settings(self.config))
        return state

    def stop(self) -> None:
        """End the loop after the batch in progress, and an evaluation at once; safe in a signal handler."""
        self.env.stop()
        if isinstance(self.evaluator, LedgerEvaluator):
            self.evaluator.stop()

    def close(self) -> None:
        """Release what is held, and flush."""
        self.commits.close()
        self.token_credit.close()
        if self.weights is not None:
            self.env.announce_weights(None)
            self.weights.close()
        self.env.close()
        self.recorder.close()
        self.checkpoints.close()

    def _apply_memory_limits(self, limits: MemoryLimits) -> None:
        """Avoid what did not fit into memory before a restart."""
        self.agent.bound_rows(limits.row_tokens)
        if limits.chain_tokens is not None:
            longest = min(self.config.max_chain_tokens or limits.chain_tokens, limits.chain_tokens)
            self.config = self.config.model_copy(update={"max_chain_tokens": longest})

    def _moments_bytes(self) -> int:
        """Return the bytes beside the weights that a new optimizer allocates in its first step."""
        on_device = self.config.optimizer_state == "device"
        return 8 * sum(parameter.numel() for parameter in self.agent.parameters()) if on_device else 0

    def _serve_weights(self) -> None:
        """Hand weights to engines from memory, and tell the proxy where."""
        if self.weights is not None:
            return
        sends = self.config.weight_transfer and self.config.kind is PolicyKind.FULL
        if sends or self.config.engine_sleep_level:
            device = self.agent.policy.device
            self.weights = WeightServer(self.config, device if device.type == "cuda" else None)
        self.env.announce_weights(None if self.weights is None else self.weights.url)

    @contextlib.contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        """Let engines on the same GPU sleep for the block, in which the trainer computes."""
        with contextlib.nullcontext() if self.weights is None else self.weights.engines_asleep():
            if self.config.engine_sleep_level:
                self.agent.world.share(None)  # the other processes wait for the first one
            try:
                yield
            finally:
                if self.config.engine_sleep_level and torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _hold(self, state: State, version: int, probe: Json | None) -> None:
        """Keep a version's weights in memory for engines; in all processes, which gather sharded weights together."""
        if not (self.config.weight_transfer and self.config.kind is PolicyKind.FULL):
            return
        weights = state.policy.published_weights()
        if self.weights is not None and not self.weights.held.hold(version, weights, probe):
            log.error("version %d has weights that are not finite; engines will refuse its directory", version)

    def _new_state(self, seed: int, *, with_weights: bool = True) -> State:
        """Return the state of a new run: the base model, unless a saved state replaces it, and a fresh optimizer."""
        self.agent.load(seed, with_weights=with_weights)
        optimizer = self._new_optimizer(self.agent.policy.parameters())
        critic = self.agent.critic
        if critic is not None:
            rate = self.config.critic_learning_rate or 10 * self.config.learning_rate
            critic.bind(self._new_optimizer(critic.parameters()), rate)
        return State(
            progress=Progress(seed=seed),
            policy=self.agent.policy,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, self.config),
            critic=critic,
        )

    def _state_of(self, version: int, seed: int, *, reports_changes: bool = False) -> State:
        """Return the state of a published version, under the current settings.

        Raises:
            BadCheckpoint: Its state is not on disk, or does not fit the model.
            SettingsError: A setting changed that cannot change within a run.
        """
        if version == 0:
            return self._new_state(seed)
        saved = self._read_state(version)
        check_resumable(saved.get("settings", {}), self.config)
        if reports_changes and self.agent.world.is_first:
            log_changes(saved.get("settings", {}), self.config)
        group = self.agent.world.control_group
        return self._new_state(seed, with_weights="model" in saved).restored(
            saved, lambda tensors: self.checkpoints.read_tensors(version, tensors, group)
        )

    def _read_state(self, version: int) -> dict[str, Any]:
        """Read the values of a version's state in the first process, for all; tensors are read by each of them.

        The other processes get empty tensors of a state in one file: the first process sends those.
        """
        world = self.agent.world
        saved: dict[str, Any] | BadCheckpoint = {}
        if world.is_first:
            try:
                saved = self.checkpoints.read_state(version)
            except BadCheckpoint as error:
                saved = error
        plain = saved
        if isinstance(saved, dict):
            plain = {name: {} if name in TENSORS else value for name, value in saved.items()}
        plain = world.share(plain)
        if isinstance(plain, BadCheckpoint):
            raise plain
        return saved if world.is_first and isinstance(saved, dict) else plain

    def _rewound(self, state: State, to: Rewind) -> State:
        """Return the state to go on from an older version's weights; the counts of the run go on.

        Without a state of that very version, the newest state before it is taken.
        """
        known = [version for version in state.progress.recent_versions if version <= to.version]
        world = self.agent.world
        version = world.share(self._newest_with_state(known, to.version) if world.is_first else None)
        try:
            older = self._state_of(version, self.config.seed)
        except BadCheckpoint as error:
            log.error("%s, and version %d cannot be trained from: %s", to.reason, version, error)  # noqa: TRY400
            return state.with_progress(rewound_to=to.version)
        log.warning("%s: going back to version %d from version %d", to.reason, version, state.progress.policy_version)
        self.commits.go_back(version)
        kept = tuple(before for before in known if before <= version)
        progress = dataclasses.replace(
            state.progress, policy_version=version, recent_versions=kept or (version,), rewound_to=to.version
        )
        set_position(older.scheduler, progress.num_optimizer_steps)
        return dataclasses.replace(older, progress=progress, buffer=state.buffer)

    def _newest_with_state(self, known: Sequence[int], otherwise: int) -> int:
        """Return the newest of these versions that can be resumed from."""
        return max((version for version in known if self.checkpoints.has_state(version)), default=otherwise)

    def _post_setup(self, state: State) -> State:
        """Return the state a run begins with; a place for warm-up."""
        return state

    def _record(self, scalars: Json, step: int) -> None:
        if scalars and self.agent.world.is_first:
            self.recorder.write(scalars, step)

    def _new_optimizer(self, parameters: list[Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters: `setup` loads them again, so a bound one cannot be kept."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            known = {key: value for key, value in self.optimizer.defaults.items() if key != "decoupled_weight_decay"}
            return type(self.optimizer)(parameters, **known)
        return self.optimizer(parameters)
