"""Stored against recomputed logprobs: whether the engine was wrong or the policy moved on, and which groups fall out.

The gradient's forward pass gives the logprobs of every token under the present weights. A group that differs by more
than the limit is compared again under the weights of the version that sampled it, unless those are the present ones:
only that tells a wrong engine, or constrained sampling, from a policy that has moved on. A group is refused alone. If
nearly all groups differ, the engine is at fault, and the training stops.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from trainer.batch.batch import Batch, Reals
from trainer.batch.ratios import finite
from trainer.batch.selection import Unfit, why_untrainable
from trainer.claims.holds import Beside, Comparison, OfFirst
from trainer.claims.ledger import Ledger
from trainer.model.agent import PolicyAgent
from trainer.model.loading import bad_checkpoint, load_model
from trainer.model.model import Policy
from trainer.publish.checkpoint import Checkpoints
from trainer.world import copied
from turnwise.errors import BadCheckpoint, EngineDisagrees
from turnwise.settings import Settings
from turnwise.types import GroupKey, Json, PolicyKind

log = logging.getLogger(__name__)

MOVED_GAP = 1.0
"""Limit, in nats, for tokens of a version whose weights are gone: a policy that trust regions hold does not move so
far."""
GROUP_TOKENS = 64
"""Tokens of a group that are computed under the version that sampled them, of the chains that differ most under the
present weights; the last chain is taken whole. An engine that is right differs by far less than the limit, so few show
it."""
SAMPLE_TOKENS = 4096
"""As `GROUP_TOKENS`, of a batch without a token that the present weights sampled."""
SAMPLE_EVERY = 10
"""Batches in a row without such a token between two of these comparisons."""
NUM_VERDICTS = 10
"""Groups that are looked at before nearly all of them may be found at fault, which stops the training."""
NEARLY_ALL = 0.9


class GapSettings(Settings):
    """What stops a group, or the training."""

    max_logprob_gap: float = Field(default=0.1, gt=0)
    """Mean |trainer − engine| of a group's tokens, in nats, above which the group is refused, under the weights that
    sampled them. If nearly all groups are over it, the training stops."""


class Verdicts:
    """Whether the latest groups are at fault: those of the last batch, and of earlier ones if it had fewer than ten."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=NUM_VERDICTS)

    def add(self, verdicts: Sequence[bool]) -> str | None:
        """Take those of a batch; return how many of how many are at fault where nearly all are, None elsewhere."""
        if len(verdicts) > len(self._latest):
            self._latest = deque(self._latest, maxlen=max(NUM_VERDICTS, len(verdicts)))
        self._latest.extend(verdicts)
        num_bad, num = sum(self._latest), len(self._latest)
        if not any(verdicts) or num < NUM_VERDICTS or num_bad < NEARLY_ALL * num:
            return None
        return f"{num_bad} of the last {num} groups"


class BatchGap:
    """|trainer − engine| of a batch's tokens, NaN for those that were not computed."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.gap: Reals = np.full(len(batch.table), np.nan, np.float32)
        """In nats; NaN where it was not computed. [M]"""
        self.is_own: npt.NDArray[np.bool_] = np.zeros(len(batch.table), np.bool_)
        """True where the weights that sampled the token computed it. [M]"""
        self.is_seen: npt.NDArray[np.bool_] = np.zeros(len(batch.table), np.bool_)
        self._has_ratio = with_ratio(batch)
        """False for tokens that cannot be compared, as those of a nucleus: a loss without ratios trains them. [M]"""
        self.num_refused = 0

    def put(self, tokens: npt.NDArray[np.int64], logprobs: Reals, is_own: npt.NDArray[np.bool_] | bool) -> None:
        self.gap[tokens] = np.abs(logprobs[tokens] - self.batch.table.behaviour[tokens])
        self.is_own[tokens], self.is_seen[tokens] = is_own, self._has_ratio[tokens]

    def mean(self, members: Iterable[int], *, is_own: bool) -> float | None:
        """Return the mean over the members' tokens of one kind; None without any."""
        tokens = np.concatenate([self.batch.tokens_of[member] for member in members])
        kept = tokens[self.is_seen[tokens] & (self.is_own[tokens] == is_own)]
        return float(self.gap[kept].mean()) if len(kept) else None

    def read(self, refused: Iterable[GroupKey]) -> Json:
        """Return the gauges, over the groups that were trained where there are any.

        Tokens that were compared under their own version's weights are the measure. Without any, all tokens are
        compared under the present weights, which adds the distance that the policy has moved.
        """
        left_out = set(refused)
        counts = [each.group_key not in left_out for each in self.batch.experiences]
        is_trained = np.array(counts, np.bool_)[self.batch.table.experience] & self.is_seen
        chosen = is_trained if is_trained.any() else self.is_seen
        own = chosen & self.is_own
        gap = self.gap[own if own.any() else chosen]
        return {
            "logprob_gap": finite(float(gap.mean())) if len(gap) else None,
            "logprob_gap_max": finite(float(gap.max())) if len(gap) else None,
            "logprob_gap_coverage": float(own.sum() / max(chosen.sum(), 1)),
            "num_gap_refused_groups": self.num_refused,
        }


class GapCheck(Beside[GapSettings]):
    """Compares every batch."""

    def __init__(self, ledger: Ledger, learner: PolicyAgent, first: OfFirst) -> None:
        super().__init__(ledger, learner, first)
        self._checkpoints = Checkpoints(ledger.settings.policies_dir, keep=ledger.settings.keep_versions)
        self._num_without_own = 0
        self._verdicts = Verdicts()

    def comparison(self, batch: Batch) -> Comparison:
        return OfBatch(self, BatchGap(batch))

    def observe(
        self, found: BatchGap, members: Sequence[int], logprobs: Reals, *, has_moved: bool
    ) -> dict[GroupKey, str]:
        """Compare the groups of an optimizer step; return those that must not be trained, with the reason.

        `logprobs` are those of the batch's tokens under the present weights, [M]; `has_moved` says whether an optimizer
        step was taken since the version that the batch is trained from.

        Raises:
            EngineDisagrees: Nearly all groups differ.
        """
        groups = _by_group(found.batch, members)
        for of in groups.values():
            for member in of:
                tokens = found.batch.tokens_of[member]
                found.put(tokens, logprobs, found.batch.table.on_policy[tokens] & (not has_moved))
        limit = self._settings.max_logprob_gap
        suspects = {key for key, of in groups.items() if self._fault(found, key, of, moved_limit=limit) is not None}
        chosen = [member for key in sorted(suspects) for member in _some(found, groups[key], GROUP_TOKENS)]
        if not has_moved:
            chosen += self._sample(found, {member for of in groups.values() for member in of})
        self._compare_under_own_weights(found, chosen)
        moved_limit = max(limit, MOVED_GAP)
        faults = {key: self._fault(found, key, groups[key], moved_limit=moved_limit) for key in suspects}
        refused = {key: reason for key, reason in faults.items() if reason is not None}
        found.num_refused += len(refused)
        if (most := self._verdicts.add([key in refused for key in groups])) is not None:
            raise EngineDisagrees(
                f"{most} have logprobs that differ between trainer and engine, the last "
                f"one: {next(reversed(refused.values()))}. Check that the engine serves the weights it says, in the "
                "same precision, with --logprobs-mode processed_logprobs; raise max_logprob_gap only if this "
                "difference is known"
            )
        return refused

    def _fault(self, found: BatchGap, key: GroupKey, members: Sequence[int], *, moved_limit: float) -> str | None:
        """Return why a group must not be trained by what is known of it; None where it may.

        `moved_limit` is the limit for tokens that other weights sampled than those that computed them.
        """
        limit = self._settings.max_logprob_gap
        gap = found.mean(members, is_own=True)
        if gap is not None and not gap <= limit:
            return _reason(key, gap, f"over max_logprob_gap={limit:g}")
        # A loss without ratios may train on tokens of any age.
        gap = found.mean(members, is_own=False) if self._learner.algorithm.needs_behaviour else None
        if gap is not None and not gap <= moved_limit:
            return _reason(key, gap, f"over {moved_limit:g} under the present weights")
        return None

    def _sample(self, found: BatchGap, members: set[int]) -> list[int]:
        """Return members of one older version to compare, if a comparison is due; the batch has no other token."""
        if found.is_own.any():
            self._num_without_own = 0
            return []
        is_due = self._num_without_own % SAMPLE_EVERY == 0
        self._num_without_own += 1
        counts: Counter[int] = Counter()
        for member in members:
            counts[_version_of(found.batch, member)] += len(found.batch.tokens_of[member])
        known = self._with_weights(counts)
        if not is_due or not known:
            return []
        most = max(known, key=lambda version: (counts[version], version))
        return _some(found, [m for m in sorted(members) if _version_of(found.batch, m) == most], SAMPLE_TOKENS)

    def _with_weights(self, versions: Iterable[int]) -> set[int]:
        return self._learner.world.from_first(
            lambda: {one for one in versions if one >= 0 and self._checkpoints.has_state(one)}
        )

    def _compare_under_own_weights(self, found: BatchGap, members: Iterable[int]) -> None:
        by_version: dict[int, list[int]] = defaultdict(list)
        for member in dict.fromkeys(members):
            if not found.is_own[found.batch.tokens_of[member]].all():
                by_version[_version_of(found.batch, member)].append(member)
        for version in sorted(self._with_weights(by_version)):
            try:
                with self._weights_of(version):
                    logprobs = self._learner.logprobs_of(found.batch, by_version[version])
            except (BadCheckpoint, Unfit) as error:
                if self._learner.world.size > 1:
                    raise
                log.warning("tokens of version %d could not be compared with the engine's: %s", version, error)
                continue
            for member in by_version[version]:
                found.put(found.batch.tokens_of[member], logprobs, is_own=True)

    @contextlib.contextmanager
    def _weights_of(self, version: int) -> Iterator[None]:
        policy = self._learner.policy
        present = copied(policy.shards())
        try:
            if version == 0:
                _load_base(policy)
            else:
                other = policy.shards()
                self._checkpoints.read_tensors(version, {"model": other}, self._learner.world)
                policy.load_shards(other)
            yield
        finally:
            policy.load_shards(present)


def _load_base(policy: Policy) -> None:
    """Load the weights of version 0: the base model, or an adapter that changes nothing; in all processes."""
    if policy.settings.kind is PolicyKind.LORA:
        shards = policy.shards()
        policy.load_shards({name: torch.zeros_like(v) if "lora_B" in name else v for name, v in shards.items()})
        return
    with bad_checkpoint(f"the trainer's state does not fit {policy.settings.model!r}"):
        policy.place.load_weights(policy, lambda: load_model(policy.settings, "eager"))


class OfBatch(Comparison):
    """The comparison of one batch."""

    def __init__(self, check: GapCheck, found: BatchGap) -> None:
        self._check = check
        self._found = found

    def why_refused(self, members: Sequence[int], logprobs: Reals, *, has_moved: bool) -> Mapping[GroupKey, str]:
        return self._check.observe(self._found, members, logprobs, has_moved=has_moved)

    def gauges(self, refused: Collection[GroupKey]) -> Json:
        return self._found.read(refused)


def with_ratio(batch: Batch) -> npt.NDArray[np.bool_]:
    """Return for each trained token whether its behaviour logprob is that of a distribution the trainer has. [M]."""
    found = np.ones(len(batch.table), np.bool_)
    for experience, tokens in zip(batch.experiences, batch.tokens_of, strict=True):
        defined = np.array([reason is None for reason in why_untrainable(experience)])
        places = batch.table.place[tokens]
        turns = experience.turn_index[places]
        is_scaled = batch.table.temperature[tokens] == experience.temperatures[turns]
        found[tokens] = defined[turns] & experience.is_known[places] & is_scaled
    return found


def _by_group(batch: Batch, members: Sequence[int]) -> dict[GroupKey, list[int]]:
    groups: dict[GroupKey, list[int]] = defaultdict(list)
    for member in members:
        experience = batch.experiences[member]
        if experience.policy_version_first >= 0 and member < batch.num_sampled and len(batch.tokens_of[member]):
            groups[experience.group_key].append(member)
    return groups


def _version_of(batch: Batch, member: int) -> int:
    experience = batch.experiences[member]
    return experience.policy_version_first if experience.policy_version_first == experience.policy_version_last else -1


def _some(found: BatchGap, members: Sequence[int], num_tokens: int) -> list[int]:
    tokens_of = found.batch.tokens_of
    gaps = {member: float(np.nan_to_num(found.gap[tokens_of[member]], nan=np.inf).mean()) for member in members}
    chosen: list[int] = []
    for member in sorted(members, key=lambda one: (-gaps[one], one)):
        if sum(len(tokens_of[one]) for one in chosen) >= num_tokens:
            break
        chosen.append(member)
    return chosen


def _reason(key: GroupKey, gap: float, limit: str) -> str:
    return (
        f"logprob_gap: trainer and engine differ by {gap:.4g} nats a token in group {key[1]!r}, {limit}: something "
        "constrained the sampling of its calls, or another model answered them"
    )
