"""The training loop, readable from top to bottom: `OnPolicyWorkflow.step` is one batch from claim to commit.

Everything that can change is in the `State` that `setup` makes and `step` hands on; a workflow is built
from five parts and holds none of the run. So a crash at any point is a resume from the last committed `State`, and the
batch that was under way is done again, draw by draw.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.nn import Parameter

from trainer.build import OptimizerLike, as_settings, make_agent, optimizer_factory
from trainer.learning.batch import Batch, build, minibatches
from trainer.learning.gauges import Gauges, finite
from trainer.learning.optimizer import make_scheduler
from trainer.loop.evaluator import Evaluator, LedgerEvaluator
from trainer.loop.selection import Selection, select
from trainer.loop.state import Progress, State
from trainer.parallel import join_world
from trainer.policy.agent import PolicyAgent
from trainer.publish import directory
from trainer.publish.checkpoint import Checkpoints
from trainer.recorders import ChainRecorder, JsonLines, Recorder
from trainer.settings import TrainerSettings
from trainer.source import ClaimedBatch, LedgerSource, Source
from turnwise.errors import BatchRefused
from turnwise.store.database import Database
from turnwise.types import GroupKey, Json, PolicyVersion, UpdateRecord

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

    @classmethod
    def name(cls) -> str:
        """Return what logs call it."""
        return cls.__name__

    @classmethod
    def build_from_config(
        cls,
        config: TrainerSettings | Mapping[str, Any],
        enable_multi_devices: bool = False,
        enable_jit: bool = True,
    ) -> Self:
        """Return a workflow over the ledger that the config names.

        Several devices exclude compilation: FSDP shards what would be compiled as a whole.
        """
        settings = as_settings(config)
        workflow = cls._build(settings)
        workflow.add_recorders([JsonLines(settings.log_path or settings.policies_dir / "trainer.jsonl")])
        if enable_multi_devices:
            workflow.enable_multi_devices()
        elif enable_jit:
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
        """Compile this instance's forward pass with `torch.compile`; before `setup`."""
        self.agent.policy.compiled = True

    def enable_multi_devices(self) -> None:
        """Train with all processes that `torchrun` started; before `setup`."""
        join_world()
        self.enable_shmap("data")

    def enable_shmap(self, axis_name: str) -> None:
        """Shard this instance's policy with FSDP2 over a device mesh whose dimension has this name; before `setup`."""
        self.agent.policy.mesh_axis = axis_name

    def setup(self, seed: int) -> State:
        """Return the state of the last committed batch, or that of a new run on an empty ledger.

        Raises:
            BadCheckpoint: The ledger names a version whose state is not on disk.
        """
        self.agent.load(seed)
        optimizer = self._new_optimizer(self.agent.policy.parameters())
        state = State(
            progress=Progress(seed=seed),
            policy=self.agent.policy,
            optimizer=optimizer,
            scheduler=make_scheduler(optimizer, self.config),
        )
        world = self.agent.world
        if world.is_first:
            self.env.open(directory.base_version(self.config.model))
        last: UpdateRecord | None = world.share(self.env.last_update() if world.is_first else None)
        if last is None:
            return self._post_setup(state)
        if last.policy_version > 0:
            state = state.restored(self.checkpoints.read_state(last.policy_version))
        if world.is_first:
            self.checkpoints.discard_after(last.policy_version)
        log.info("resuming after batch %d at policy version %d", last.update_id, last.policy_version)
        if "buffer" in last.metrics:
            state = dataclasses.replace(state, buffer=last.metrics["buffer"])
        # Refused batches leave no checkpoint; the ledger's count includes them.
        return self._post_setup(_with_progress(state, num_batches=last.update_id))

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
        return state

    def close(self) -> None:
        """Give back what is held, and flush."""
        self.env.close()
        self.recorder.close()

    def _post_setup(self, state: State) -> State:
        """Return the state a run begins with; a place for warm-up."""
        return state

    def _record(self, scalars: Json, step: int) -> None:
        if scalars and self.agent.world.is_first:
            self.recorder.write(scalars, step)

    def _new_optimizer(self, parameters: list[Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of these parameters: `setup` loads them afresh, so a bound one cannot be kept."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            known = {key: value for key, value in self.optimizer.defaults.items() if key != "decoupled_weight_decay"}
            return type(self.optimizer)(parameters, **known)
        return self.optimizer(parameters)


class OnPolicyWorkflow(RLWorkflow):
    """Claims rewarded groups, trains on them while they are fresh, publishes, and lets them go."""

    @classmethod
    def _build(cls, settings: TrainerSettings) -> Self:
        db = Database(settings.database.get_secret_value())
        evaluator = LedgerEvaluator(db, settings.evaluation_command, settings.evaluation_seconds)
        return cls(
            LedgerSource(db, settings),
            make_agent(settings),
            optimizer_factory(settings),
            evaluator,
            settings,
        )

    def step(self, state: State) -> tuple[Json, State]:
        """Train on one claimed batch: claim, credit, updates, checkpoint, commit."""
        claimed = self._claim(max(0, state.progress.policy_version - self.config.max_staleness))
        if claimed is None:
            return {}, state
        return self._train(state, claimed, time.monotonic())

    def _claim(self, oldest: int) -> ClaimedBatch | None:
        """Return the next batch, in all processes; None when the source was closed."""
        world = self.agent.world
        claimed: ClaimedBatch | None = world.share(self.env.next_batch(oldest) if world.is_first else None)
        return claimed

    def _train(self, state: State, claimed: ClaimedBatch, started: float) -> tuple[Json, State]:
        """Learn from a batch's experiences, and finish its claim with what came of it."""
        chosen = self._select(claimed)
        metrics = _claim_gauges(claimed, chosen, state)
        if not chosen.experiences:
            return self._finish_untrained(state, claimed, metrics, chosen.refused)
        batch = build(
            chosen.experiences,
            chosen.advantages,
            policy_version=state.progress.policy_version,
            pairs=chosen.pairs,
            chosen=chosen.chosen,
        )
        try:
            num_steps, gauges = self._update(state, batch)
        except BatchRefused as error:
            log.error("batch %d refused: %s", state.progress.num_batches + 1, error)  # noqa: TRY400  no bug of ours
            reasons = {group.key: f"refused: {error}" for group in claimed.claim.groups}
            return self._finish_untrained(state, claimed, metrics | {"refused": str(error)}, reasons)
        metrics |= gauges | {"num_updates": num_steps, "seconds": time.monotonic() - started}
        return self._commit(state, claimed, chosen, metrics, num_steps)

    def _select(self, claimed: ClaimedBatch) -> Selection:
        return select(
            claimed.experiences,
            sorted({experience.group_key for experience in claimed.experiences} | _group_keys(claimed)),
            self.config.algorithm,
            self.config,
            self.config.sft_min_reward,
        )

    def _update(self, state: State, batch: Batch) -> tuple[int, Json]:
        """Take `num_minibatches` optimizer steps in each of `reuse_epochs` passes; return how many, and the gauges."""
        rng = state.rng()
        proximal = self.agent.proximal_logprobs(batch)
        total, norms, num_steps = Gauges(), list[float](), 0
        for _ in range(self.config.reuse_epochs):
            for members in minibatches(batch, self.config.num_minibatches, rng):
                gauges, norm = self.agent.optimizer_step(
                    state.optimizer, batch, members, proximal=proximal, is_first=num_steps == 0
                )
                state.scheduler.step()
                num_steps += 1
                total.add(gauges)
                norms.append(norm)
                number = state.progress.num_optimizer_steps + num_steps
                self._record(
                    {"update": number, **gauges.read(), "grad_norm": finite(norm)}, state.progress.num_batches + 1
                )
        taken = [norm for norm in norms if np.isfinite(norm)]
        read = total.read() | {
            "grad_norm": float(np.mean(taken)) if taken else None,
            "num_skipped_updates": len(norms) - len(taken),
            "learning_rate": state.optimizer.param_groups[0]["lr"],
        }
        return num_steps, read

    def _commit(
        self, state: State, claimed: ClaimedBatch, chosen: Selection, metrics: Json, num_steps: int
    ) -> tuple[Json, State]:
        """Write the version, then make it count: ack, update and policy in one transaction."""
        world = self.agent.world
        parent = state.progress.policy_version
        version = world.share(max(self.env.newest_version(), parent) + 1 if world.is_first else None)
        after = dataclasses.replace(
            _with_progress(
                state,
                num_batches=state.progress.num_batches + 1,
                num_optimizer_steps=state.progress.num_optimizer_steps + num_steps,
                policy_version=version,
                num_groups=state.progress.num_groups + len(claimed.claim.groups) - len(chosen.refused),
                num_sessions=state.progress.num_sessions + metrics["num_sessions"],
                num_tokens=state.progress.num_tokens + metrics["tokens"],
                num_refused_groups=state.progress.num_refused_groups + len(chosen.refused),
            ),
            metrics=metrics | {"policy_version": version},
        )
        saved = after.state_dict()
        probe = directory.probe_of(state.policy, chosen.experiences)
        if world.is_first:
            path = directory.write_version(
                self.checkpoints, state.policy, saved["model"], version=version, parent=parent, probe=probe
            )
            self.checkpoints.write_state(version, saved)
            policy = PolicyVersion(
                version=version,
                path=str(path),
                kind=self.config.kind,
                update_id=after.progress.num_batches,
                metrics=after.metrics,
            )
            refusals = self._refusals(claimed, chosen.refused)
            self.env.ack(claimed, self._record_of(after, claimed, chosen), policy, refusals)
            self.checkpoints.prune({version, parent} | self.env.versions_in_use())
        return after.metrics, after

    def _finish_untrained(
        self, state: State, claimed: ClaimedBatch, metrics: Json, reasons: dict[GroupKey, str]
    ) -> tuple[Json, State]:
        """Finish a batch that nothing was learnt from: no new version, groups dropped with their reasons."""
        reasons = self._refusals(claimed, reasons)
        after = _with_progress(
            state,
            num_batches=state.progress.num_batches + 1,
            num_refused_groups=state.progress.num_refused_groups + len(reasons),
        )
        metrics = metrics | {"policy_version": state.progress.policy_version, "num_refused_groups": len(reasons)}
        after = dataclasses.replace(after, metrics=metrics)
        if self.agent.world.is_first:
            record = self._record_of(after, claimed, None)
            # No checkpoint holds what this batch did to the buffer, so the ledger does.
            carried = {"buffer": after.buffer} if after.buffer else {}
            self.env.ack(claimed, dataclasses.replace(record, metrics=metrics | carried), None, reasons)
        return metrics, after

    def _refusals(self, claimed: ClaimedBatch, reasons: dict[GroupKey, str]) -> dict[GroupKey, str]:
        """Return which of the claimed groups are dropped, and why."""
        return {group: reason for group, reason in reasons.items() if group in _group_keys(claimed)}

    def _record_of(self, after: State, claimed: ClaimedBatch, chosen: Selection | None) -> UpdateRecord:
        """Return the ledger's line for a batch; its id is the count of batches."""
        learnt = chosen is not None
        return UpdateRecord(
            update_id=after.progress.num_batches,
            trainer_id=self.config.trainer_id,
            policy_version=after.progress.policy_version,
            num_groups=len(claimed.claim.groups) - len(chosen.refused) if chosen is not None else 0,
            num_sessions=after.metrics["num_sessions"] if learnt else 0,
            num_tokens=after.metrics["tokens"] if learnt else 0,
            metrics=after.metrics,
        )


def _group_keys(claimed: ClaimedBatch) -> set[GroupKey]:
    return {group.key for group in claimed.claim.groups}


def _with_progress(state: State, **changes: int) -> State:
    return dataclasses.replace(state, progress=dataclasses.replace(state.progress, **changes))


def _claim_gauges(claimed: ClaimedBatch, chosen: Selection, state: State) -> Json:
    """Return what is known of a batch before it is trained on."""
    sessions = {experience.session_key: experience.reward for experience in claimed.experiences}
    rewards = np.array(list(sessions.values()) or [0.0])
    version = state.progress.policy_version
    staleness = [version - experience.policy_version_first for experience in claimed.experiences] or [0]
    uniform = sum(reason == "uniform_rewards" for reason in chosen.refused.values())
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": int(max(staleness)),
        "num_groups": len(claimed.claim.groups),
        "num_stale_groups": claimed.claim.num_stale,
        "num_uniform_groups": uniform,
        "num_refused_groups": len(chosen.refused),
        "num_sessions": len({experience.session_key for experience in chosen.experiences}),
        "waited_seconds": claimed.waited_seconds,
    }
