"""All that changes while training, saved whole, and how a trained batch ends: published, written, acknowledged with it.

Random numbers are derived from the seed and the count of batches. So a batch that is repeated after a crash draws the
same numbers, whatever was drawn before it.

Engines get a version first. One that is held in memory for them is published at once; other engines read directories,
so the directory is written before. All else is a thread's work while training goes on: the directory, its digest, and
after every `checkpoint_every` versions a copy of the state. One transaction then acknowledges the batches that are in
the state. A trainer that dies in between leaves their groups claimable, and the next one trains them from the last
state on. So every group is in the weights exactly once. A version whose state was not written is followed by one that
does not contain it, under a new number; one whose directory was not written fails, and engines go back.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from trainer.batch.advantages import SingleValue
from trainer.batch.chain import Chain
from trainer.batch.selection import Selection
from trainer.claims.ledger import ClaimedBatch, Kept, Ledger, RunProgress
from trainer.model.adapters import Adapter
from trainer.model.agent import PolicyAgent, Schedule
from trainer.model.heads import Head
from trainer.model.model import Policy
from trainer.publish.checkpoint import Checkpoints
from trainer.settings import TrainerSettings
from turnwise.store import claims, updates
from turnwise.store import versions as stored_versions
from turnwise.types import Json, PolicyVersion, SessionKey, UpdateRecord
from turnwise.version_directory import weights_digest

log = logging.getLogger(__name__)

MOST_RECENT_VERSIONS = 64
"""How many versions `RunProgress.recent_versions` holds; nothing counts as more stale than this."""
PROBE_TOKENS = 48
OWN = frozenset({"progress", "metrics", "heads", "singles", "settings"})
"""The values of a saved state that are not of `State.kept`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `setup` returns, and `step` takes and returns.

    The tensors behind `policy`, `optimizer` and `schedule` are updated in place, since torch binds an optimizer to
    them. Do not use a `State` again after it was passed to `step`.
    """

    progress: RunProgress
    policy: Policy
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    metrics: Json = dataclasses.field(default_factory=dict)
    kept: Kept = dataclasses.field(default_factory=dict)
    """What claims keep for later batches."""
    singles: tuple[SingleValue, ...] = ()
    """Values of recent single sessions, oldest first: the baseline of the coming ones."""
    heads: Sequence[Head] = ()
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
        torch.manual_seed(int(self.progress.seeds().generate_state(1)[0]))
        return self.progress.rng()

    def values(self) -> dict[str, Any]:
        heads, progress = [head.name for head in self._trained_heads()], dataclasses.asdict(self.progress)
        metrics = json.loads(json.dumps(self.metrics))  # torch would not load numpy's numbers again
        return {"progress": progress, "metrics": metrics, "heads": heads, **self.of_batches()}

    def of_batches(self) -> Json:
        """Return what batches change also if they make no version."""
        return {**self.kept, "singles": list(map(list, self.singles))}

    def tensors(self) -> dict[str, Any]:
        """Return the tensors that a resume needs, of which this process holds all or its shards; not copied."""
        own = {name: value for head in self._trained_heads() for name, value in head.tensors().items()}
        optimizer = get_optimizer_state_dict(self.policy.model, self.optimizer)
        return {"model": self.policy.shards(), "optimizer": optimizer, **own}

    def restored(self, saved: dict[str, Any], fill: Callable[[dict[str, Any]], None]) -> State:
        """Return this state with the saved weights, optimizer moments and counts, which `values` returned.

        The optimizer's settings and the seed stay as they are now. The learning rate follows from the counts.
        """
        tensors = ("params", "param_names")
        settings = [{k: v for k, v in group.items() if k not in tensors} for group in self.optimizer.param_groups]
        self._load_tensors(fill, saved.get("heads", ()))
        for group, kept in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(kept)
        versions = tuple(saved["progress"]["recent_versions"])
        progress = RunProgress(**(saved["progress"] | {"seed": self.progress.seed, "recent_versions": versions}))
        self.schedule.set(progress.num_optimizer_steps, progress.num_batches)
        return dataclasses.replace(self, progress=progress, metrics=saved["metrics"]).with_batches(saved)

    def with_batches(self, saved: Json) -> State:
        kept = {name: value for name, value in saved.items() if name not in OWN}
        return dataclasses.replace(self, kept=kept, singles=tuple(SingleValue(*row) for row in saved["singles"]))

    def _load_tensors(self, fill: Callable[[dict[str, Any]], None], saved_heads: Collection[str]) -> None:
        tensors = self.tensors()
        kept = []
        for head in self._trained_heads():
            if head.name in saved_heads:
                kept.append(head)
                continue
            log.warning("the checkpoint has no %s: a new one is trained", head.name)
            for name in head.tensors():
                del tensors[name]
        fill(tensors)
        self.policy.load_shards(tensors["model"])
        set_optimizer_state_dict(self.policy.model, self.optimizer, tensors["optimizer"])
        for head in kept:
            head.load_tensors(tensors)

    def _trained_heads(self) -> list[Head]:
        return [head for head in self.heads if head.optimizer is not None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """What training has made of a batch."""

    version: int
    weights: dict[str, Tensor]
    """Whole and on the CPU, copied; empty in all processes but the first."""
    probe: Json
    is_held: bool
    trained_at: float
    """When its last optimizer step ended, on the monotonic clock."""
    trained: Mapping[SessionKey, updates.Advantages]
    unpublished: str | None = None
    """Why engines must not get it; None where they may."""


def probe_of(policy: Policy, experiences: Sequence[Chain]) -> Json:
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
        ledger: Ledger,
        learner: PolicyAgent,
        checkpoints: Checkpoints,
        settings: TrainerSettings,
        kept: Sequence[Callable[[], set[int]]],
    ) -> None:
        """Each of `kept` returns versions that stay on disk besides those in use."""
        self._ledger = ledger
        self._learner = learner
        self._checkpoints = checkpoints
        self._settings = settings
        self._kept = kept
        self._saved_settings = settings.saved()
        self._pending: list[claims.Finished] = []
        """Batches that no written state contains, oldest first. In the first process alone."""
        self._num_versions = 0
        self._directory: Future[None] | None = None
        self._writing: Future[None] | None = None
        """The newest state that is or was written, until it is waited for."""
        self._written: set[int] = set()
        """The versions of the last state and of the one that is being written: a restart may need them."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._base_probe: Json | None = None
        """The probe of version 0, which every version carries; None if this run never had its weights."""

    def start(self, version: int, probe: Json | None) -> None:
        self._written = {version}
        self._base_probe = (probe or {}).get("base")

    def probe_base(self, state: State, experiences: Sequence[Chain]) -> None:
        if experiences and state.progress.policy_version == 0:
            self._base_probe = probe_of(state.policy, experiences)

    def with_base(self, probe: Json) -> Json:
        return probe if self._base_probe is None else probe | {"base": self._base_probe}

    def go_back(self, version: int) -> None:
        self._written = self._written | {version}

    def next_version(self, state: State) -> int:
        at = state.progress.policy_version
        return 1 + self._learner.world.from_first(lambda: max(self._ledger.newest_version(), at))

    def commit(
        self,
        state: State,
        claimed: ClaimedBatch,
        chosen: Selection,
        metrics: Json,
        num_steps: int,
        made: NewVersion,
    ) -> tuple[Json, State]:
        """Publish the version; write it, and acknowledge its batch with the state that contains it.

        A version that the publishing gate refused is kept on disk and stored as failed, with the reason.
        """
        version, parent, progress = made.version, state.progress.policy_version, state.progress
        after = dataclasses.replace(
            state.with_progress(
                num_batches=progress.num_batches + 1,
                update_id=self._learner.world.from_first(self._ledger.next_update_id),
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
        seconds = 0.0
        if self._learner.world.is_first:
            policy = self._published(after, parent, made)
            seconds = time.monotonic() - made.trained_at
            finished = claims.Finished(
                claimed.claim,
                update=self._record_of(state, after),
                policy=policy,
                refused=claimed.dropped(chosen.refused),
                trained=made.trained,
            )
            self._pending.append(finished)
        self._num_versions += 1
        if self._num_versions >= self._settings.checkpoint_every:
            self._write_behind(after)
        if self._learner.world.is_first:
            self._prune({version, parent})
        return after.metrics | {"publish_seconds": seconds}, after

    def finish_untrained(
        self, state: State, claimed: ClaimedBatch, metrics: Json, chosen: Selection | None
    ) -> tuple[Json, State]:
        reasons = {} if chosen is None else chosen.refused
        dropped = claimed.dropped(reasons)
        after = state.with_progress(
            num_batches=state.progress.num_batches + 1,
            update_id=self._learner.world.from_first(self._ledger.next_update_id),
            num_refused_groups=state.progress.num_refused_groups + len(dropped),
        )
        metrics = metrics | {"policy_version": state.progress.policy_version, "num_refused_groups": len(reasons)}
        after = dataclasses.replace(after, metrics=metrics)
        if self._learner.world.is_first:
            record = self._record_of(state, after)
            # No checkpoint holds what this batch left for later ones, so the ledger does.
            finished = claims.Finished(claimed.claim, update=record, refused=dropped, state=after.of_batches())
            self._pending.append(finished)
            self.settle()
        return metrics, after

    def settle(self) -> None:
        """Acknowledge what can be acknowledged now; raise what went wrong in the thread."""
        if not self._learner.world.is_first:
            return
        if self._directory is not None and self._directory.done():
            self._wait_for_directory()
        if self._writing is not None and self._writing.done():
            self._wait()
        if self._writing is None and self._num_versions == 0 and (batches := self._take()):
            self._ledger.ack(batches)

    def finish_writing(self) -> None:
        self._wait_for_directory()
        self._wait()

    def flush(self, state: State) -> None:
        """Acknowledge everything, after a state that contains it."""
        self.finish_writing()
        if self._num_versions:
            self._write_behind(state)
        self.finish_writing()
        self.settle()

    def close(self) -> None:
        self._thread.shutdown()

    def _published(self, after: State, parent: int, made: NewVersion) -> PolicyVersion:
        """Publish the version, and write its directory: before that, or behind it where engines need none."""
        self._wait_for_directory()  # one at a time: of the versions in memory only the newest is not on disk
        policy = PolicyVersion(
            version=made.version,
            policy_id=self._ledger.policy_id,
            path=str(self._checkpoints.policy_directory(made.version).resolve()),
            kind=self._settings.kind,
            update_id=after.progress.update_id,
            metrics=after.metrics,
            error=None if made.unpublished is None else f"{stored_versions.REFUSED_BY_GATE}: {made.unpublished}",
        )
        if made.is_held:
            self._announce(policy, after, parent, made)
        self._directory = self._thread.submit(self._write_directory, policy, after, parent, made)
        if not made.is_held:
            self._wait_for_directory()
        return policy

    def _announce(self, policy: PolicyVersion, after: State, parent: int, made: NewVersion) -> None:
        for hold in self._ledger.holds:
            hold.announced(policy, parent, made.trained)
        self._ledger.publish(policy, after.progress.recent_versions)

    def _write_directory(self, policy: PolicyVersion, after: State, parent: int, made: NewVersion) -> None:
        model, settings = after.policy, self._settings
        manifest: Json = {
            "parent": parent,
            "kind": settings.kind.value,
            "base_model": settings.model,
            "probe": made.probe,
        }
        path = self._checkpoints.write_policy(made.version, lambda place: model.save(place, made.weights), manifest)
        written = dataclasses.replace(policy, weights_digest=weights_digest(path))
        self._announce(written, after, parent, made)
        log.debug("version %d is on disk %.2f s after its training", made.version, time.monotonic() - made.trained_at)

    def _write_behind(self, state: State) -> None:
        """Copy the state, and write it in the thread. One state is written at a time."""
        self._wait()
        version = state.progress.policy_version
        self._written = self._written | {version}
        values = state.values() | {"settings": self._saved_settings}
        tensors = self._learner.world.to_write(state.tensors())
        batches, self._num_versions = self._take(), 0
        self._writing = self._thread.submit(self._write_and_ack, version, values, tensors, batches, self._directory)

    def _write_and_ack(
        self,
        version: int,
        values: dict[str, Any],
        tensors: dict[str, Any] | None,
        batches: list[claims.Finished],
        directory: Future[None] | None,
    ) -> None:
        """Write a state, then acknowledge the batches in it; nothing where the version's directory was not written."""
        if directory is not None:
            directory.result()
        self._checkpoints.write_state(version, values, tensors, self._learner.world.background_group)
        if batches:
            self._ledger.ack(batches)
        self._written = {version}

    def _take(self) -> list[claims.Finished]:
        taken, self._pending = self._pending, []
        return taken

    def _wait_for_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.result()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _prune(self, versions: set[int]) -> None:
        every = self._settings.keep_every
        kept = set() if every is None else {one for one in self._checkpoints.versions() if one % every == 0}
        kept = kept.union(*(versions_of() for versions_of in self._kept))
        self._checkpoints.prune(versions | kept | self._written | self._ledger.versions_in_use())

    def _record_of(self, before: State, after: State) -> UpdateRecord:
        progress, was = after.progress, before.progress
        return UpdateRecord(
            update_id=progress.update_id,
            policy_id=self._ledger.policy_id,
            trainer_id=self._settings.trainer_id,
            policy_version=progress.policy_version,
            num_groups=progress.num_groups - was.num_groups,
            num_sessions=progress.num_sessions - was.num_sessions,
            num_tokens=progress.num_tokens - was.num_tokens,
            metrics=after.metrics,
        )
