"""On-policy training, readable from top to bottom: `OnPolicyWorkflow.step` is one batch from claim to commit.

A batch that was in progress at a crash is repeated with the same random numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import numpy as np
from torch import Tensor

from trainer.build import make_agent, optimizer_factory
from trainer.learning.batch import Batch, build, minibatches
from trainer.learning.gauges import Gauges, finite
from trainer.learning.regression import GateResult, judge, shifts_of
from trainer.learning.selection import UNIFORM, Selection, select, without_groups
from trainer.learning.values import turn_advantages
from trainer.loop.base import RLWorkflow
from trainer.loop.claimed import claim_gauges, group_keys, num_minibatches
from trainer.loop.evaluator import LedgerEvaluator
from trainer.loop.restore_point import RestorePoint
from trainer.loop.resume import saved_settings
from trainer.loop.state import MOST_RECENT_VERSIONS, State
from trainer.pacing import Position, Rewind
from trainer.policy.agent import OutOfMemory
from trainer.policy.memory_limits import read_limits, write_limits
from trainer.publish import directory
from trainer.settings import TrainerSettings
from trainer.source import ClaimedBatch, FinishedBatch, LedgerSource
from turnwise.errors import BatchRefused
from turnwise.experience import Experience
from turnwise.store.database import Database
from turnwise.types import GroupKey, Json, PolicyVersion, UpdateRecord
from turnwise.version_directory import weights_digest

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_REFILL_FACTOR = 4
"""A batch is refilled to at most this many times its groups."""


class OnPolicyWorkflow(RLWorkflow):
    """Claims rewarded groups, trains on them, publishes a version, and acknowledges them."""

    @classmethod
    def _build(cls, settings: TrainerSettings) -> Self:
        db = Database(settings.database.get_secret_value())
        evaluator = LedgerEvaluator(db, settings.evaluation_command, settings.evaluation_seconds, settings.proxy_url)
        return cls(
            LedgerSource(db, settings, with_imported=settings.reads_no_behaviour),
            make_agent(settings),
            optimizer_factory(settings),
            evaluator,
            settings,
        )

    def step(self, state: State) -> tuple[Json, State]:
        """Train on one claimed batch: claim, credit, updates, checkpoint, commit."""
        claimed, state = self._next_batch(state)
        if claimed is None:
            return {}, state
        return self._train(state, self._refilled(claimed, state), time.monotonic())

    def _refilled(self, claimed: ClaimedBatch, state: State) -> ClaimedBatch:
        """Return the batch with a further group for each one of equal rewards, as far as there are any.

        Yu et al. 2025 (DAPO, arXiv:2503.14476), dynamic sampling.
        """
        wanted = len(claimed.claim.groups)
        while self.config.refill_seconds is not None and len(claimed.claim.groups) < MAX_REFILL_FACTOR * wanted:
            missing = sum(reason == UNIFORM for reason in self._select(claimed).refused.values()) - claimed.num_refills
            if missing <= 0:
                break
            world = self.agent.world
            more = world.share(self.env.refill(claimed, missing, self._position(state)) if world.is_first else None)
            if more is None:
                break
            claimed = more
        return claimed

    def _next_batch(self, state: State) -> tuple[ClaimedBatch | None, State]:
        """Return the next batch, and the state to train it from: the source may ask to go back to another version."""
        claimed = self._claim(self._position(state))
        while isinstance(claimed, Rewind):
            state = self._rewound(state, claimed)
            claimed = self._claim(self._position(state))
        if claimed is not None and claimed.pinned is None:
            state = state.with_progress(rewound_to=None)
        return claimed, state

    def _position(self, state: State) -> Position:
        """Return where the trainer is, for the source's decisions about staleness."""
        progress = state.progress
        return Position(
            recent_versions=progress.recent_versions,
            min_policy_version=progress.oldest_trainable(self.config.max_staleness),
            is_first_batch=progress.num_batches == 0,
            rewound_to=progress.rewound_to,
        )

    def _claim(self, at: Position) -> ClaimedBatch | Rewind | None:
        """Return the next batch, in all processes; None when the source was closed."""
        world = self.agent.world
        if world.is_first:
            self.commits.settle()
        claimed: ClaimedBatch | Rewind | None = world.share(self.env.next_batch(at) if world.is_first else None)
        return claimed

    def _train(self, state: State, claimed: ClaimedBatch, started: float) -> tuple[Json, State]:
        """Train on a batch's experiences and finish its claim."""
        chosen, num_imported, imported = self.imported.added(self._select(claimed), state.progress, self.agent.world)
        metrics = claim_gauges(claimed, chosen, state) | imported
        if not chosen.experiences:
            return self._finish_untrained(state, claimed, metrics, chosen.refused)
        batch = self.imported.batch_of(chosen, num_imported, state.progress)
        too_large: dict[GroupKey, str] = {}
        try:
            with self._engines_asleep():
                stale = self.gap_check.compare(batch)
                batch, chosen, credit_gauges = self._with_token_credit(batch, chosen, too_large)
                num_steps, gauges = self._update(state, batch, num_minibatches(claimed, batch, self.config), too_large)
        except BatchRefused as error:
            log.error("batch %d refused: %s", state.progress.num_batches + 1, error)  # noqa: TRY400  no defect
            reasons = {group.key: f"refused: {error}" for group in claimed.claim.groups}
            return self._finish_untrained(state, claimed, metrics | {"refused": str(error)}, reasons)
        if too_large:
            chosen = without_groups(chosen, too_large)
            metrics |= {"num_refused_groups": len(chosen.refused), "num_groups_out_of_memory": len(too_large)}
        if not num_steps:
            return self._finish_untrained(state, claimed, metrics, chosen.refused)
        gauges = self.gap_check.report(stale, gauges)
        metrics |= gauges | credit_gauges | {"num_updates": num_steps, "seconds": time.monotonic() - started}
        gate = self._check_regression(state)
        return self._commit(state, claimed, chosen, metrics | gate.gauges, num_steps, gate.reason)

    def _with_token_credit(
        self, batch: Batch, chosen: Selection, too_large: dict[GroupKey, str]
    ) -> tuple[Batch, Selection, Json]:
        """Return batch and selection with the advantages that need a model, and their gauges."""
        if not self.token_credit.is_needed:
            return batch, chosen, {}
        members = range(batch.num_sampled)
        found = self._fitting(batch, members, too_large, lambda fit: self.token_credit.assign(batch, fit))
        if found is None:
            return batch, chosen, {}
        batch, gauges = found
        return batch, dataclasses.replace(chosen, advantages=turn_advantages(batch)), gauges

    def _check_regression(self, state: State) -> GateResult:
        """Compare the updated weights with held-out sessions, before they are published."""
        rule, world = self.config, self.agent.world
        if not rule.gate_sessions:
            return GateResult(gauges={})
        labels = [*rule.gate_good_labels, *rule.gate_bad_labels]
        found: Sequence[Experience]
        found, labels_of = world.share(self.env.regression_set(rule.gate_sessions, labels) if world.is_first else None)
        found = self._comparable(found)
        credit = [np.zeros(len(experience.turn_ids)) for experience in found]
        batch = build(found, credit, policy_version=state.progress.policy_version)
        try:
            logprobs = self.agent.logprobs_of(batch, range(len(found)))
        except OutOfMemory as error:
            if world.size > 1:
                self._note_out_of_memory(error)
                raise
            log.warning("the publishing gate was not applied: %s; set a smaller max_chain_tokens", error)
            return GateResult(gauges={})
        result = judge(shifts_of(batch, logprobs, labels_of, rule), rule)
        if result.reason is not None:
            log.error("the version is kept and not served: %s", result.reason)
        return result

    def _comparable(self, found: Sequence[Experience]) -> list[Experience]:
        """Return the sessions of the regression set that this model can compute."""
        kept = [experience for experience in found if self.agent.policy.replay.refusal(experience) is None]
        if len(kept) < len(found):
            log.warning(
                "the publishing gate leaves out %d of %d chains, whose turns were routed in another model",
                len(found) - len(kept),
                len(found),
            )
        return kept

    def _select(self, claimed: ClaimedBatch) -> Selection:
        return select(
            claimed.experiences,
            sorted({experience.group_key for experience in claimed.experiences} | group_keys(claimed)),
            self.config.algorithm,
            self.config,
        )

    def _update(
        self, state: State, batch: Batch, num_minibatches: int, too_large: dict[GroupKey, str]
    ) -> tuple[int, Json]:
        """Take so many optimizer steps in each of `reuse_epochs` passes; return how many, and the gauges.

        Groups that do not fit into memory are left out from there on, and added to `too_large` with the reason.

        Raises:
            BatchRefused: The batch must not be trained. The state is as it was.
        """
        may_refuse_late = self.config.custom_loss is not None and num_minibatches * self.config.reuse_epochs > 1
        before = RestorePoint(state) if may_refuse_late else None
        try:
            return self._take_steps(state, batch, num_minibatches, too_large)
        except BatchRefused:
            if before is not None:
                before.restore(state)
            raise

    def _take_steps(
        self, state: State, batch: Batch, num_minibatches: int, too_large: dict[GroupKey, str]
    ) -> tuple[int, Json]:
        rng = state.rng()
        sampled = range(batch.num_sampled)
        proximal = self._fitting(batch, sampled, too_large, lambda fit: self.agent.proximal_logprobs(batch, fit))
        total, norms, num_steps = Gauges(), list[float](), 0
        for _ in range(self.config.reuse_epochs):
            for members in minibatches(batch, num_minibatches, rng):
                step = functools.partial(
                    self.agent.optimizer_step, state.optimizer, batch, proximal=proximal, is_first=num_steps == 0
                )
                taken = self._fitting(batch, members, too_large, step)
                if taken is None:
                    continue
                gauges, norm = taken
                state.scheduler.step()
                num_steps += 1
                total.add(gauges)
                norms.append(norm)
                number = state.progress.num_optimizer_steps + num_steps
                if not np.isfinite(norm):
                    log.warning("optimizer step %d is skipped: a gradient is not finite", number)
                self._record(
                    {"update": number, **gauges.read(), "grad_norm": finite(norm)}, state.progress.num_batches + 1
                )
        finite_norms = [norm for norm in norms if np.isfinite(norm)]
        read = total.read() | {
            "grad_norm": float(np.mean(finite_norms)) if finite_norms else None,
            "num_skipped_updates": len(norms) - len(finite_norms),
            "learning_rate": state.optimizer.param_groups[0]["lr"],
        }
        return num_steps, read

    def _fitting(
        self,
        batch: Batch,
        members: Sequence[int],
        too_large: dict[GroupKey, str],
        compute: Callable[[list[int]], Result],
    ) -> Result | None:
        """Compute over the members whose groups fit into memory; None where none does."""
        while fit := [member for member in members if batch.experiences[member].group_key not in too_large]:
            try:
                return compute(fit)
            except OutOfMemory as error:
                if self.agent.world.size > 1:
                    self._note_out_of_memory(error)
                    raise
                for member in error.units.values():
                    key = batch.experiences[member].group_key
                    too_large[key] = f"out_of_memory: {error}; set max_chain_tokens below that"
                    log.error("group %s is not trained: %s", key[1], too_large[key])  # noqa: TRY400  no defect
        return None

    def _note_out_of_memory(self, error: OutOfMemory) -> None:
        """Store what did not fit, for the next start: several processes end together when one runs out of memory."""
        place = self.config.policies_dir
        is_pairs = self.config.algorithm == "dpo"
        write_limits(place, read_limits(place).after(error.num_tokens, len(error.units), is_pairs=is_pairs))

    def _commit(
        self,
        state: State,
        claimed: ClaimedBatch,
        chosen: Selection,
        metrics: Json,
        num_steps: int,
        refusal: str | None,
    ) -> tuple[Json, State]:
        """Write the version, publish it, and acknowledge its batch with the state that contains it.

        A version that the publishing gate refused is kept on disk and stored as failed, with the reason.
        """
        world = self.agent.world
        parent = state.progress.policy_version
        version = world.share(max(self.env.newest_version(), parent) + 1 if world.is_first else None)
        after = dataclasses.replace(
            state.with_progress(
                num_batches=state.progress.num_batches + 1,
                num_optimizer_steps=state.progress.num_optimizer_steps + num_steps,
                policy_version=version,
                recent_versions=(*state.progress.recent_versions, version)[-MOST_RECENT_VERSIONS:],
                num_groups=state.progress.num_groups + len(claimed.claim.groups) - len(chosen.refused),
                num_sessions=state.progress.num_sessions + metrics["num_sessions"],
                num_tokens=state.progress.num_tokens + metrics["tokens"],
                num_refused_groups=state.progress.num_refused_groups + len(chosen.refused),
            ),
            metrics=metrics | {"policy_version": version},
        )
        probe = directory.probe_of(state.policy, chosen.experiences)
        self._hold(state, version, probe)
        weights = state.policy.trained_state()
        finished = self._written(after, claimed, chosen, weights, parent, probe, refusal) if world.is_first else None
        self.commits.add(finished, after, saved_settings(self.config))
        if world.is_first:
            needed = self.commits.needed_versions | self.env.versions_in_use()
            kept = self.env.best_versions(self.config.keep_best) | self._kept_for_good()
            self.checkpoints.prune({version, parent} | needed | kept)
        return after.metrics, after

    def _kept_for_good(self) -> set[int]:
        every = self.config.keep_every
        return set() if every is None else {one for one in self.checkpoints.versions() if one % every == 0}

    def _written(
        self,
        after: State,
        claimed: ClaimedBatch,
        chosen: Selection,
        weights: dict[str, Tensor],
        parent: int,
        probe: Json,
        refusal: str | None,
    ) -> FinishedBatch:
        """Write the directory of the version; return the batch to publish and acknowledge."""
        version = after.progress.policy_version
        path = directory.write_version(
            self.checkpoints, after.policy, weights, version=version, parent=parent, probe=probe
        )
        return FinishedBatch(
            batch=claimed,
            update=self._record_of(after, claimed, chosen),
            policy=PolicyVersion(
                version=version,
                path=str(path),
                kind=self.config.kind,
                update_id=after.progress.num_batches,
                metrics=after.metrics,
                weights_digest=weights_digest(path),
                error=None if refusal is None else f"refused by the publishing gate: {refusal}",
            ),
            refused=self._refusals(claimed, chosen.refused),
            trained=chosen.advantages_by_session(),
        )

    def _finish_untrained(
        self, state: State, claimed: ClaimedBatch, metrics: Json, reasons: dict[GroupKey, str]
    ) -> tuple[Json, State]:
        """Finish a batch without an update: no new version, groups dropped with their reasons."""
        reasons = self._refusals(claimed, reasons)
        after = state.with_progress(
            num_batches=state.progress.num_batches + 1,
            num_refused_groups=state.progress.num_refused_groups + len(reasons),
        )
        metrics = metrics | {"policy_version": state.progress.policy_version, "num_refused_groups": len(reasons)}
        after = dataclasses.replace(after, metrics=metrics)
        if self.agent.world.is_first:
            record = self._record_of(after, claimed, None)
            # No checkpoint holds what this batch did to the buffer, so the ledger does.
            carried = {"buffer": after.buffer} if after.buffer else {}
            record = dataclasses.replace(record, metrics=metrics | carried)
            self.commits.add_untrained(FinishedBatch(batch=claimed, update=record, refused=reasons))
        return metrics, after

    def _refusals(self, claimed: ClaimedBatch, reasons: dict[GroupKey, str]) -> dict[GroupKey, str]:
        """Return which of the claimed groups are dropped, and why."""
        return {group: reason for group, reason in reasons.items() if group in group_keys(claimed)}

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
