"""Experiences made by hand for tests of the trainer's arithmetic."""

from collections.abc import Sequence

import numpy as np

from trainer.batch.chain import Chain, chain_of
from trainer.features.supports.turns import Vocabulary, with_processors
from turnwise.chains import Experience


def experience(
    *,
    session_id: str = "s",
    group_id: str = "g",
    tenant: str = "default",
    turns: int = 1,
    reward: float = 0.0,
    turn_returns: Sequence[float] | None = None,
    credit: str = "propagate",
    tokens: Sequence[int] | None = None,
    loss_mask: Sequence[bool] | None = None,
    logprobs: Sequence[float] | None = None,
    sampling: Sequence[dict] | None = None,
    version: int = 0,
) -> Chain:
    """Return an experience whose turns are [one prompt token, two sampled ones] each, unless tokens are given."""
    mask = np.array([False, True, True] * turns if loss_mask is None else loss_mask)
    index = np.where(mask, np.minimum(np.cumsum(~mask) - 1, turns - 1), -1)
    ids = np.arange(1, len(mask) + 1) if tokens is None else np.array(tokens)
    stored = Experience(
        session_id=session_id,
        group_id=group_id,
        tenant=tenant,
        turn_ids=tuple(f"{session_id}-{turn}" for turn in range(turns)),
        turn_steps=tuple(range(turns)),
        tokens=ids.astype(np.int32),
        prompt_length=int(mask.argmax()),
        loss_mask=mask,
        turn_index=index.astype(np.int32),
        logprobs=np.where(mask, -1.0 if logprobs is None else np.array(logprobs), 0.0).astype(np.float32),
        turn_rewards=np.zeros(turns),
        turn_own_rewards=np.zeros(turns),
        turn_returns=np.array([reward] * turns if turn_returns is None else turn_returns, np.float64),
        turn_shares=np.ones((2, turns)),
        reward=reward,
        policy_version_first=version,
        policy_version_last=version,
        info={"credit": credit, "sampling": list(sampling or [{}] * turns)},
    )
    return claimed(stored)


def claimed(stored: Experience, vocabulary: Vocabulary | None = None) -> Chain:
    """Return a stored chain as a claim gives it."""
    return with_processors(chain_of(stored), vocabulary)
