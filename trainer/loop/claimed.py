"""What is known of a claimed batch before it is trained on: its groups, its gauges, its number of optimizer steps."""

from __future__ import annotations

import numpy as np

from trainer.learning.batch import Batch
from trainer.learning.selection import UNIFORM, Selection
from trainer.loop.state import State
from trainer.settings import TrainerSettings
from trainer.source import ClaimedBatch
from turnwise.types import GroupKey, Json


def group_keys(claimed: ClaimedBatch) -> set[GroupKey]:
    """Return the keys of the claimed groups."""
    return {group.key for group in claimed.claim.groups}


def num_minibatches(claimed: ClaimedBatch, batch: Batch, config: TrainerSettings) -> int:
    """Return the optimizer steps of a pass: fewer for a batch of fewer groups, and never more than groups are trained.

    So an update sees as many groups in a small batch as in a whole one, as far as there are any. Imported groups that
    are mixed in do not count: a step with them alone would imitate at the whole learning rate, whatever μ is.
    """
    num_read = len({experience.group_key for experience in claimed.experiences})
    share = -(-num_read * config.num_minibatches // config.groups_per_batch)
    num_trained = len({experience.group_key for experience in batch.experiences[: batch.num_sampled]})
    return max(1, min(config.num_minibatches, share, num_trained))


def claim_gauges(claimed: ClaimedBatch, chosen: Selection, state: State) -> Json:
    """Return what is known of a batch before it is trained on."""
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
        "num_groups": len(claimed.claim.groups),
        "num_stale_groups": claimed.claim.num_stale,
        "num_uniform_groups": uniform,
        "num_refill_groups": claimed.num_refills,
        "num_refused_groups": len(chosen.refused),
        "num_sessions": len({experience.session_key for experience in chosen.experiences}),
        "waited_seconds": claimed.waited_seconds,
        "held_seconds": claimed.held_seconds,
    }
