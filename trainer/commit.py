"""What becomes of a trained batch: its version on disk and published, its groups acknowledged with the state.

With `checkpoint_every = 1` the state is written first, then one transaction publishes the version and acknowledges its
groups. With more, a version is published at once and its groups stay claimed. Every so many batches a thread writes a
copy of the state, and then one transaction acknowledges all batches that are in it. A trainer that dies in between
leaves those groups claimable, and the next one trains them from the last state on. So every group is in the weights
exactly once either way, and a version that was published meanwhile is followed by one that does not contain it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from trainer.claims import group_keys
from trainer.learning.selection import Selection
from trainer.policy.engine import TrainingEngine
from trainer.policy.model import Policy
from trainer.publish.checkpoint import Checkpoints
from trainer.settings import TrainerSettings
from trainer.source import ClaimedBatch, FinishedBatch, Source
from trainer.state import MOST_RECENT_VERSIONS, State, copied
from turnwise.experience import Experience
from turnwise.store.policies import REFUSED_BY_GATE
from turnwise.types import GroupKey, Json, PolicyVersion, UpdateRecord
from turnwise.version_directory import weights_digest

PROBE_TOKENS = 48
"""Length of a probe's text."""


def probe_of(policy: Policy, experiences: Sequence[Experience]) -> Json:
    """Return the beginning of the batch's first chain and the logprob of each of its tokens after those before it.

    A version carries it in its manifest: the proxy asks the engine for the same logprobs after a reload, and so checks
    that it serves these weights.
    """
    tokens = experiences[0].tokens[:PROBE_TOKENS].tolist()
    log_p_TV = policy.next_logprobs(tokens)
    followers = torch.tensor(tokens[1:], dtype=torch.long)
    is_coarse = policy.compute_dtype is torch.bfloat16
    return {
        "token_ids": tokens,
        "logprobs": log_p_TV[:-1].gather(1, followers[:, None])[:, 0].tolist(),
        "dtype": "bfloat16" if is_coarse else "float32",
    }


class Commits:
    """Writes versions and states, and acknowledges what they contain; every process calls it in step."""

    def __init__(
        self,
        env: Source,
        agent: TrainingEngine,
        checkpoints: Checkpoints,
        config: TrainerSettings,
        *,
        keeps_refused: bool,
    ) -> None:
        """`keeps_refused`: a group that was not trained this time is not dropped, since it is in a replay buffer."""
        self._env = env
        self._agent = agent
        self._checkpoints = checkpoints
        self._config = config
        self._keeps_refused = keeps_refused
        self._pending: list[FinishedBatch] = []
        """Batches that no written state contains, oldest first. In the first process alone."""
        self._num_versions = 0
        """Versions since the last state."""
        self._writing: Future[None] | None = None
        self._written: set[int] = set()
        """The versions of the last state and of the one that is being written: a restart may need them."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def start(self, version: int) -> None:
        """Begin with the state of this version on disk."""
        self._written = {version}

    def go_back(self, version: int) -> None:
        """Note that the weights are those of this version again."""
        self._written = self._written | {version}

    def next_version(self, state: State) -> int:
        """Return the number of the version that follows, in all processes."""
        world = self._agent.world
        newest = max(self._env.newest_version(), state.progress.policy_version) if world.is_first else 0
        version: int = world.share(newest + 1)
        return version

    def commit(
        self,
        state: State,
        claimed: ClaimedBatch,
        chosen: Selection,
        metrics: Json,
        num_steps: int,
        version: int,
        weights: dict[str, Tensor],
        probe: Json,
        refusal: str | None,
    ) -> tuple[Json, State]:
        """Write the version, publish it, and acknowledge its batch with the state that contains it.

        A version that the publishing gate refused is kept on disk and stored as failed, with the reason.
        """
        parent, progress = state.progress.policy_version, state.progress
        after = dataclasses.replace(
            state.with_progress(
                num_batches=progress.num_batches + 1,
                num_optimizer_steps=progress.num_optimizer_steps + num_steps,
                policy_version=version,
                recent_versions=(*progress.recent_versions, version)[-MOST_RECENT_VERSIONS:],
                num_groups=progress.num_groups + metrics["num_groups"] - len(chosen.refused),
                num_sessions=progress.num_sessions + metrics["num_sessions"],
                num_tokens=progress.num_tokens + metrics["tokens"],
                num_refused_groups=progress.num_refused_groups + len(chosen.refused),
            ),
            metrics=metrics | {"policy_version": version},
        )
        if self._agent.world.is_first:
            policy = self._written_version(after, weights, parent, probe, refusal)
            finished = FinishedBatch(
                batch=claimed,
                update=self._record_of(after, chosen),
                policy=policy,
                refused=self._dropped(claimed, chosen.refused),
                trained=chosen.advantages_by_session(),
            )
            self._pending.append(finished)
        self._write(after)
        if self._agent.world.is_first:
            self._prune({version, parent})
        return after.metrics, after

    def finish_untrained(
        self, state: State, claimed: ClaimedBatch, metrics: Json, chosen: Selection | None
    ) -> tuple[Json, State]:
        """Finish a batch without an update: no new version, groups dropped with the reasons of the selection."""
        reasons = {} if chosen is None else chosen.refused
        dropped = self._dropped(claimed, reasons)
        after = state.with_progress(
            num_batches=state.progress.num_batches + 1,
            num_refused_groups=state.progress.num_refused_groups + len(dropped),
        )
        metrics = metrics | {"policy_version": state.progress.policy_version, "num_refused_groups": len(reasons)}
        after = dataclasses.replace(after, metrics=metrics)
        if self._agent.world.is_first:
            record = self._record_of(after, None)
            # No checkpoint holds what this batch did to the buffer and to the window, so the ledger does.
            carried: Json = {"buffer": after.buffer} if after.buffer else {}
            if chosen is not None and chosen.single_rows:
                carried["singles"] = [list(row) for row in chosen.single_rows]
            record = dataclasses.replace(record, metrics=metrics | carried)
            self._pending.append(FinishedBatch(batch=claimed, update=record, refused=dropped))
            self.settle()
        return metrics, after

    def settle(self) -> None:
        """Acknowledge what can be acknowledged now; raise what went wrong in the thread."""
        if not self._agent.world.is_first:
            return
        if self._writing is not None and self._writing.done():
            self._wait()
        if self._writing is None and self._num_versions == 0:
            self._ack(self._take())

    def flush(self, state: State) -> None:
        """Acknowledge everything, after a state that contains it."""
        self._wait()
        if self._num_versions:
            self._write_behind(state)
        self._wait()
        self.settle()

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    def _written_version(
        self, after: State, weights: dict[str, Tensor], parent: int, probe: Json, refusal: str | None
    ) -> PolicyVersion:
        """Write the directory of the version; return its record."""
        version, spec = after.progress.policy_version, after.policy.spec
        manifest: Json = {"parent": parent, "kind": spec.kind.value, "base_model": spec.model, "probe": probe}
        path = self._checkpoints.write_policy(version, lambda place: after.policy.save(place, weights), manifest)
        return PolicyVersion(
            version=version,
            path=str(path),
            kind=self._config.kind,
            update_id=after.progress.num_batches,
            metrics=after.metrics,
            weights_digest=weights_digest(path),
            error=None if refusal is None else f"{REFUSED_BY_GATE}: {refusal}",
        )

    def _write(self, state: State) -> None:
        """Write the state and acknowledge, or publish the version now and do so later."""
        self._num_versions += 1
        if self._config.checkpoint_every == 1:
            batches, self._num_versions = self._take(), 0
            self._write_and_ack(state.progress.policy_version, self._values(state), state.tensors(), batches)
            return
        if self._pending and self._pending[-1].policy is not None:
            self._env.publish(self._pending[-1].policy)
        if self._num_versions >= self._config.checkpoint_every:
            self._write_behind(state)

    def _write_behind(self, state: State) -> None:
        """Copy the state, and write it in the thread. One state is written at a time."""
        self._wait()
        version = state.progress.policy_version
        self._written = self._written | {version}
        values, tensors = self._values(state), copied(state.tensors())
        batches, self._num_versions = self._take(), 0
        self._writing = self._thread.submit(self._write_and_ack, version, values, tensors, batches)

    def _write_and_ack(
        self, version: int, values: dict[str, Any], tensors: dict[str, Any], batches: list[FinishedBatch]
    ) -> None:
        """Write a state, then acknowledge the batches in it."""
        self._checkpoints.write_state(version, values, tensors, self._agent.world.background_group)
        self._ack(batches)
        self._written = {version}

    def _ack(self, batches: list[FinishedBatch]) -> None:
        if batches:
            self._env.ack(batches)

    def _take(self) -> list[FinishedBatch]:
        taken, self._pending = self._pending, []
        return taken

    def _wait(self) -> None:
        """Wait for the state that is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _values(self, state: State) -> dict[str, Any]:
        return state.values() | {"settings": self._config.saved()}

    def _prune(self, versions: set[int]) -> None:
        """Remove the versions that nothing needs any more."""
        every = self._config.keep_every
        kept = set() if every is None else {one for one in self._checkpoints.versions() if one % every == 0}
        kept |= self._env.best_versions(self._config.keep_best)
        self._checkpoints.prune(versions | kept | self._written | self._env.versions_in_use())

    def _dropped(self, claimed: ClaimedBatch, reasons: dict[GroupKey, str]) -> dict[GroupKey, str]:
        """Return which of the claimed groups are dropped, and why."""
        keys = set() if self._keeps_refused else group_keys(claimed)
        return {group: reason for group, reason in reasons.items() if group in keys}

    def _record_of(self, after: State, chosen: Selection | None) -> UpdateRecord:
        """Return the ledger's line for a batch; its id is the count of batches."""
        learnt = chosen is not None
        return UpdateRecord(
            update_id=after.progress.num_batches,
            trainer_id=self._config.trainer_id,
            policy_version=after.progress.policy_version,
            num_groups=after.metrics["num_groups"] - len(chosen.refused) if chosen is not None else 0,
            num_sessions=after.metrics["num_sessions"] if learnt else 0,
            num_tokens=after.metrics["tokens"] if learnt else 0,
            metrics=after.metrics,
        )
