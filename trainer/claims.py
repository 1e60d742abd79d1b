"""From the ledger to a batch: which groups are claimed, what of them is trained, and what is known of them before.

Imported sessions are drawn by the seed and the count of batches, so a repeated batch trains on the same ones. They are
not claimed: every batch may draw them again.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection

import numpy as np

from trainer.algorithms.algorithm import Imitation, select
from trainer.batch.advantages import UNIFORM, is_single
from trainer.batch.batch import Batch, build
from trainer.batch.selection import Selection, joined, num_turns_left_out
from trainer.ledger import ClaimedBatch
from trainer.model.engine import TrainingEngine
from trainer.pacing import SMALLEST_PART, Position, Rewind
from trainer.settings import TrainerSettings
from trainer.source import LedgerSource
from trainer.state import State
from turnwise.types import GroupKey, Json

log = logging.getLogger(__name__)

MAX_REFILL_FACTOR = 4
"""A batch is refilled to at most this many times its groups."""
_DRAW = 1
"""Distinguishes the random numbers of imported sessions from those that shuffle the batch."""


class Claims:
    """Claims batches and selects what is trained of them; every process calls it in step."""

    def __init__(self, env: LedgerSource, agent: TrainingEngine, config: TrainerSettings, *, is_sample: bool) -> None:
        """`is_sample`: the experiences come from a replay buffer, into which the claimed groups are put."""
        self._env = env
        self._agent = agent
        self._is_sample = is_sample
        self.config = config
        self.patience: float | None = None
        """Seconds to wait for a batch; None without an end, 0 where other policies train meanwhile."""

    def next(self, state: State) -> ClaimedBatch | Rewind | None:
        """Return the next batch, or the request to go on from another version; None where there is none in time."""
        return self._agent.world.from_first(lambda: self._env.next_batch(self._position(state), self.patience))

    def refilled(self, claimed: ClaimedBatch, state: State) -> ClaimedBatch:
        """Return the batch with further groups in the place of those of equal rewards, as far as there are any.

        With `refill_seconds` all are replaced: Yu et al. 2025 (DAPO, arXiv:2503.14476), dynamic sampling. Without it, a
        quarter of the batch is to have an advantage. Nothing is waited for while other policies could train.
        """
        config = self.config
        patience = 0.0 if self.patience == 0 else config.refill_limit
        most, until = MAX_REFILL_FACTOR * len(claimed.claim.groups), time.monotonic() + patience
        size = claimed.claim.size(config.singles_per_group)
        needed = -(-size // SMALLEST_PART) if config.refill_seconds is None else size
        while len(claimed.claim.groups) < most:
            uniform = {key for key, why in self.select(claimed, state).refused.items() if why == UNIFORM}
            num_uniform = claimed.claim.size(config.singles_per_group, uniform)
            missing = needed - (claimed.claim.size(config.singles_per_group) - num_uniform)
            if missing <= 0:
                break
            refill = functools.partial(self._env.refill, claimed, missing, self._position(state), until)
            more = self._agent.world.from_first(refill)
            if more is None:
                break
            claimed = more
        return claimed

    def select(self, claimed: ClaimedBatch, state: State) -> Selection:
        """Return what is trained of the claimed groups."""
        keys = {experience.group_key for experience in claimed.experiences}
        if not self._is_sample:
            keys |= group_keys(claimed)
        return select(claimed.experiences, sorted(keys), self._agent.algorithm, self.config, state.singles)

    def selected(self, claimed: ClaimedBatch, state: State) -> tuple[Selection, int, Json]:
        """Return the selection with imported experiences at its end, their number, and what is known of the batch."""
        chosen = self.select(claimed, state)
        found = {experience.group_key for experience in claimed.experiences}
        num_groups = len(found if self._is_sample else claimed.claim.groups)
        imitation = self._agent.algorithm.imitation
        if imitation is None:
            return chosen, 0, claim_gauges(claimed, chosen, state, num_groups)
        drawn = self._drawn(state, imitation)
        num_sessions = len({experience.session_key for experience in drawn.experiences})
        imported = {"num_imported_sessions": num_sessions, "mix_mu": imitation.share(state.progress.num_batches)}
        both = joined(chosen, drawn)
        return both, len(drawn.experiences), claim_gauges(claimed, both, state, num_groups) | imported

    def batch_of(self, chosen: Selection, num_imported: int, state: State) -> Batch:
        """Return the batch of a selection that ends with so many imported experiences."""
        imitation = self._agent.algorithm.imitation
        return build(
            chosen.experiences,
            chosen.advantages,
            policy_version=state.progress.policy_version,
            pairs=chosen.pairs,
            chosen=chosen.chosen,
            num_imported=num_imported,
            mu=imitation.share(state.progress.num_batches) if num_imported and imitation is not None else 0.0,
            needs_behaviour=self._agent.algorithm.needs_behaviour,
        )

    def _drawn(self, state: State, imitation: Imitation) -> Selection:
        """Return what is trained of imported sessions that are drawn for this batch."""
        progress = state.progress
        rng = np.random.default_rng([progress.seed, progress.num_batches, _DRAW])
        found = self._agent.world.from_first(lambda: self._env.imported(imitation.num_groups, rng))
        keys = sorted({experience.group_key for experience in found})
        drawn = select(found, keys, imitation.algorithm, self.config)
        if not drawn.experiences:
            log.warning(
                "no imported session could be mixed in: %d groups were drawn, and left out for these reasons: %s; "
                "import conversations with `turnwise import`",
                len(keys),
                sorted(set(drawn.refused.values())),
            )
        return drawn

    def _position(self, state: State) -> Position:
        """Return where the trainer is, for the source's decisions about staleness.

        A replay buffer is not paced: it waits for no version, since it holds old turns anyway.
        """
        progress, is_paced = state.progress, not self._is_sample
        return Position(
            recent_versions=progress.recent_versions,
            min_policy_version=progress.oldest_trainable(self.config.max_staleness) if is_paced else None,
            is_first_batch=progress.num_batches == 0,
            is_paced=is_paced,
            rewound_to=progress.rewound_to,
        )


def group_keys(claimed: ClaimedBatch) -> set[GroupKey]:
    """Return the keys of the claimed groups."""
    return {group.key for group in claimed.claim.groups}


def num_minibatches(claimed: ClaimedBatch, batch: Batch, config: TrainerSettings) -> int:
    """Return the optimizer steps of a pass: fewer for a batch of fewer groups, and never more than groups are trained.

    So an update sees as many groups in a small batch as in a whole one, as far as there are any. Imported groups that
    are mixed in do not count: a step with them alone would imitate at the whole learning rate, whatever μ is.
    """
    singles = {experience.group_key for experience in claimed.experiences if is_single(experience)}
    num_read = len({experience.group_key for experience in claimed.experiences} - singles)
    num_read += -(-len(singles) // config.singles_per_group)
    share = -(-num_read * config.num_minibatches // config.groups_per_batch)
    num_trained = len({experience.group_key for experience in batch.experiences[: batch.num_sampled]})
    return max(1, min(config.num_minibatches, share, num_trained))


def claim_gauges(claimed: ClaimedBatch, chosen: Selection, state: State, num_groups: int) -> Json:
    """Return what is known of a batch of so many groups before it is trained on."""
    sessions = {experience.session_key: experience.reward for experience in claimed.experiences}
    rewards = np.array(list(sessions.values()) or [0.0])
    staleness = [
        state.progress.staleness_of(one.policy_version_first)
        for one in claimed.experiences
        if one.policy_version_first >= 0
    ] or [0]
    uniform = sum(reason == UNIFORM for reason in chosen.refused.values())
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": int(max(staleness)),
        "num_groups": num_groups,
        "num_single_sessions": len({one.session_key for one in claimed.experiences if is_single(one)}),
        "num_stale_groups": claimed.claim.num_stale,
        "num_uniform_groups": uniform,
        "num_refill_groups": claimed.num_refills,
        "num_refused_groups": len(chosen.refused),
        "num_sessions": len({experience.session_key for experience in chosen.experiences}),
        "waited_seconds": claimed.waited_seconds,
        "held_seconds": claimed.held_seconds,
    }


def left_out_gauges(
    claimed: ClaimedBatch, chosen: Selection, trained: Collection[str], rule: TrainerSettings
) -> dict[str, int]:
    """Return how many turns of the trained groups carry no loss, and how many for each reason.

    `trained` has the ids of the turns that do.
    """
    needs = rule.algorithm.needs_behaviour
    counts = num_turns_left_out(claimed.experiences, chosen.refused, trained, rule, needs_behaviour=needs)
    by_reason = {f"num_turns_left_out_{reason}": count for reason, count in sorted(counts.items())}
    return {"num_turns_left_out": sum(counts.values()), **by_reason}
