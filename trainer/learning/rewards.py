"""The reward of a session as the trainer sees it: named rewards weighed, overlong sessions shaped.

Nothing here is stored: the ledger keeps the rewards as they were posted.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from turnwise.experience import Experience
from turnwise.settings import Settings, parsed_json
from turnwise.types import Credit, Json, SessionKey

OVERLONG_PENALTY = 1.0
"""Largest penalty of an overlong session: a success that is too long is worth a failure, where rewards are 0 or 1."""
OVERLONG_SHARE = 0.5
"""Share of `overlong_tokens` over which the penalty rises."""


class RewardRule(Settings):
    """How the reward of a session is made from what was posted."""

    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward name, for sessions with propagated credit; names that are not listed weigh 1."""
    overlong_tokens: int | None = Field(default=None, ge=1)
    """A session with so many sampled tokens or more has a reward that is less by 1. The penalty rises linearly from 0
    at half of them. None turns it off."""
    overlong_mask: bool = False
    """Do not train sessions with a turn that ended at the token limit; they still count in their group's baseline."""

    @field_validator("reward_weights", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        return parsed_json(value)


def shape_rewards(
    experiences: Sequence[Experience],
    rule: RewardRule,
    combine: Callable[[Mapping[str, float], Json], float | None],
) -> list[Experience]:
    """Return the experiences with the rewards and returns that are trained.

    Args:
        experiences: As stored.
        rule: Weights and penalties.
        combine: Returns a session's reward from its rewards by name and its metadata; None: by the rule.
    """
    lengths: dict[SessionKey, int] = defaultdict(int)
    for experience in experiences:
        lengths[experience.session_key] += int(experience.loss_mask.sum())
    shaped = []
    for experience in experiences:
        own = combine(rewards_by_name(experience), experience.info.get("metadata") or {})
        reward = _weighed(experience, rule) if own is None else float(own)
        penalty = overlong_penalty(lengths[experience.session_key], rule)
        changed = reward != experience.reward or penalty
        shaped.append(_with_reward(experience, reward, penalty) if changed else experience)
    return shaped


def rewards_by_name(experience: Experience) -> dict[str, float]:
    """Return the session's rewards by name; one without names is its reward under the name `reward`."""
    found: Mapping[str, float] = experience.info.get("rewards") or {"reward": experience.reward}
    return dict(found)


def overlong_penalty(num_tokens: int, rule: RewardRule) -> float:
    """Return min(max((L − (L_max − L_buffer)) / L_buffer, 0), 1) · penalty.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 13, soft overlong punishment.
    """
    if rule.overlong_tokens is None:
        return 0.0
    buffer = rule.overlong_tokens * OVERLONG_SHARE
    over = num_tokens - (rule.overlong_tokens - buffer)
    return OVERLONG_PENALTY * min(max(over / buffer, 0.0), 1.0)


def is_truncated(experience: Experience) -> bool:
    """Whether a turn of the chain ended at the token limit."""
    return "length" in (experience.info.get("finish_reasons") or ())


def _weighed(experience: Experience, rule: RewardRule) -> float:
    if not rule.reward_weights:
        return experience.reward
    return sum(rule.reward_weights.get(name, 1.0) * value for name, value in rewards_by_name(experience).items())


def _with_reward(experience: Experience, reward: float, penalty: float) -> Experience:
    """Return the experience under another session reward; step by step, the penalty falls on its last turn."""
    if experience.info.get("credit") == Credit.STEP_WISE:
        returns, rewards = experience.turn_returns.copy(), experience.turn_rewards.copy()
        returns[-1] -= penalty
        rewards[-1] -= penalty
        return dataclasses.replace(experience, reward=reward - penalty, turn_returns=returns, turn_rewards=rewards)
    returns = np.full(len(experience.turn_ids), reward - penalty)
    return dataclasses.replace(experience, reward=reward - penalty, turn_returns=returns, turn_rewards=returns)
