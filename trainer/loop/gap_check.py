"""Comparison of trainer and engine on stale tokens, under the weights of the version that sampled them.

Tokens of the current version are compared in the first optimizer step, which costs nothing. An asynchronous run may
have none. Then the trainer loads the state of an older version that sampled part of the batch, computes the logprobs of
some of its tokens, compares them with what the engine reported, and puts the present weights back bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator

import numpy as np

from trainer.learning.batch import Batch
from trainer.loop.state import copied
from trainer.policy.agent import AgentRule, OutOfMemory, PolicyAgent
from trainer.publish.checkpoint import Checkpoints
from turnwise.errors import BadCheckpoint, BatchRefused
from turnwise.types import Json

log = logging.getLogger(__name__)

UNCOMPARED = ("sft", "dpo")
"""Losses that take no ratio to what the engine reported."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StaleGap:
    """The result of a comparison."""

    version: int
    """The version that sampled the tokens."""
    mean: float
    """Of |trainer − engine|, nats."""
    share: float
    """Share of the batch's trained tokens that were compared."""


class GapCheck:
    """Compares stale tokens every so many batches; every process calls it in step."""

    def __init__(self, agent: PolicyAgent, checkpoints: Checkpoints, rule: AgentRule) -> None:
        self._agent = agent
        self._checkpoints = checkpoints
        self._rule = rule
        self._num_uncompared: int | None = None
        """Batches since the last comparison; None before the first one."""

    def compare(self, batch: Batch) -> StaleGap | None:
        """Compare stale tokens of a batch if a comparison is due; None if none is, or none is possible.

        Raises:
            BatchRefused: Engine and trainer disagree.
        """
        every = self._rule.gap_check_every
        is_first = self._num_uncompared is None or every is None
        self._num_uncompared = 0 if is_first else (self._num_uncompared or 0) + 1
        is_needed = float(np.mean(batch.table.on_policy)) < self._rule.min_gap_coverage
        if every is None or not is_needed or 0 < self._num_uncompared < every:
            return None
        self._num_uncompared = 0
        world = self._agent.world
        version = world.share(self._most_sampled(batch) if world.is_first else None)
        if version is None:
            return None
        found = self._compared(batch, version)
        if found is not None and not found.mean <= self._rule.max_logprob_gap:
            raise BatchRefused(
                f"trainer and engine differ by {found.mean:.4g} nats a token on tokens that version {version} sampled, "
                f"over max_logprob_gap={self._rule.max_logprob_gap}: check that the engine serves the weights it says, "
                "in the same precision, with --logprobs-mode processed_logprobs"
            )
        return found

    def report(self, stale: StaleGap | None, gauges: Json) -> Json:
        """Return the gauges with the stale tokens in them; warn where hardly a token was compared."""
        if stale is not None:
            gauges = gauges | {
                "logprob_gap_stale": stale.mean,
                "logprob_gap_stale_version": stale.version,
                "logprob_gap_coverage": gauges["logprob_gap_coverage"] + stale.share,
            }
        share = gauges["logprob_gap_coverage"]
        # Between two comparisons nothing new is known; a warning for each batch would hide the one that matters.
        if not self._num_uncompared and share < self._rule.min_gap_coverage and self._rule.algorithm not in UNCOMPARED:
            log.warning(
                "only %.1f %% of the trained tokens could be compared with the engine's logprobs, since older versions "
                "without a state on disk sampled the others: a wrong engine may go unnoticed (min_gap_coverage)",
                100 * share,
            )
        return gauges

    def _most_sampled(self, batch: Batch) -> int | None:
        """Return the version with a state that sampled most of the trained tokens; None without one."""
        counts: Counter[int] = Counter()
        for tokens, experience in zip(batch.tokens_of, batch.experiences, strict=True):
            first = experience.policy_version_first
            if first and first == experience.policy_version_last:
                counts[first] += len(tokens)
        known = [version for version, _ in counts.most_common() if self._checkpoints.has_state(version)]
        return known[0] if known else None

    def _compared(self, batch: Batch, version: int) -> StaleGap | None:
        members = _some_members(batch, version, self._rule.gap_check_tokens)
        try:
            with self._weights_of(version):
                logprobs = self._agent.logprobs_of(batch, members)
        except (BadCheckpoint, OutOfMemory) as error:
            if self._agent.world.size > 1:
                raise
            log.warning("tokens of version %d could not be compared with the engine's: %s", version, error)
            return None
        tokens = np.concatenate([batch.tokens_of[member] for member in members])
        gap = np.abs(logprobs[tokens] - batch.table.behaviour[tokens])
        return StaleGap(version=version, mean=float(gap.mean()), share=len(tokens) / len(batch.table))

    @contextlib.contextmanager
    def _weights_of(self, version: int) -> Iterator[None]:
        """Hold the weights of another version inside the block.

        Raises:
            BadCheckpoint: Its state cannot be read.
        """
        policy = self._agent.policy
        present = copied(policy.shards())
        try:
            other = policy.shards()
            self._checkpoints.read_tensors(version, {"model": other}, self._agent.world.control_group)
            policy.load_shards(other)
            yield
        finally:
            policy.load_shards(present)


def _some_members(batch: Batch, version: int, num_tokens: int) -> list[int]:
    """Return experiences of a version, until they hold so many trained tokens."""
    members: list[int] = []
    total = 0
    for member, experience in enumerate(batch.experiences):
        is_sampled = experience.policy_version_first == experience.policy_version_last == version
        if is_sampled and len(batch.tokens_of[member]) and total < num_tokens:
            members.append(member)
            total += len(batch.tokens_of[member])
    return members
