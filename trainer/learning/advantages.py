"""Rewards to advantages: each estimator a few lines with its paper. NumPy in float64, no torch, no state.

An estimator gets one *bucket* of values that are compared with each other. `assign` alone decides what a bucket is:
all sessions of a group, or all turns at one step of a group. So each estimator serves both. Legend: N values, G
members of one bucket, K turns of one experience.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.learning.imports import import_function
from trainer.learning.rewards import RewardRule, rewards_by_name
from turnwise.experience import Experience
from turnwise.types import Credit, GroupKey, SessionKey

Floats = npt.NDArray[np.float64]

Estimator = Literal[
    "reinforce",
    "rloo",
    "grpo",
    "dr_grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "gae",
    "teacher",
]
GroupBy = Literal["auto", "session", "step"]
Singleton = Literal["zero", "raw"]

BY_TOKEN = ("gae", "teacher")
"""Estimators that need a model: their advantages are computed token by token once the batch is built."""

UNIFORM_TOLERANCE = 1e-12
"""Relative spread up to which values count as equal, so that a division does not amplify their rounding."""

STD_EPSILON = 1e-6
"""Added to the standard deviation before a division by it."""


class AdvantageRule(RewardRule):
    """Which estimator, over what, and the conventions that papers leave open."""

    estimator: Estimator = "grpo"
    """How values become advantages; docs/training.md lists the estimators with their papers."""
    custom_advantage: str | None = None
    """`module:function` that takes the values of one group as an array and returns their advantages; it takes the
    estimator's place."""
    group_by: GroupBy = "auto"
    """`session`: one value a session, its reward, centred over the group. `step`: one value a turn, its return,
    centred over the turns of the group at the same step. `auto`: by step where the session's credit is step-wise."""
    ddof: Literal[0, 1] = 1
    """Of the standard deviation: 1 divides by G − 1 as torch, TRL and verl do, 0 by G as NumPy does."""
    singleton: Singleton = "zero"
    """Advantage of a bucket with one value: `zero` gives none, so nothing is trained; `raw` gives the value itself."""


def reinforce(values: Floats) -> Floats:
    """Return the values themselves, no baseline. Williams 1992 (REINFORCE), section 4 with b = 0."""
    return values.copy()


def rloo(values: Floats) -> Floats:
    """Return x_i − mean of the others; G ≥ 2. Kool et al. 2019; for LLMs Ahmadian et al. 2024 (arXiv:2402.14740)."""
    size = len(values)
    centred: Floats = values - values.mean()
    return centred * (size / (size - 1))


def grpo(values: Floats, *, ddof: int, epsilon: float = STD_EPSILON) -> Floats:
    """Return (x_i − mean) / (std + ε). Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; G ≥ 2."""
    normalised: Floats = (values - values.mean()) / (values.std(ddof=ddof) + epsilon)
    return normalised


def dr_grpo(values: Floats) -> Floats:
    """Return x_i − mean: no std, which favours easy and hard tasks. Liu et al. 2025 (arXiv:2503.20783), section 3.1."""
    centred: Floats = values - values.mean()
    return centred


def whiten(values: Floats, *, ddof: int, epsilon: float = STD_EPSILON) -> Floats:
    """Return the values normalised over the whole batch. Hu et al. 2025 (arXiv:2501.03262)."""
    if len(values) <= ddof or _uniform(values):
        return np.zeros_like(values)
    normalised: Floats = (values - values.mean()) / (values.std(ddof=ddof) + epsilon)
    return normalised


def estimate(values: Floats, buckets: Sequence[Hashable], rule: AdvantageRule) -> Floats:
    """Return the advantage of each value.

    Args:
        values: What is compared. [N]
        buckets: Which values are compared with each other. [N]
        rule: Estimator and conventions.
    """
    if rule.custom_advantage is not None:
        custom = import_function(rule.custom_advantage, "custom_advantage")
        return _by_bucket(values, buckets, lambda members: np.asarray(custom(members), np.float64), rule.singleton)
    if rule.estimator == "reinforce":
        return reinforce(values)
    if rule.estimator == "reinforce_plus_plus":
        return whiten(values, ddof=rule.ddof)
    centre: dict[str, Callable[[Floats], Floats]] = {
        "rloo": rloo,
        "grpo": lambda members: grpo(members, ddof=rule.ddof),
        "dr_grpo": dr_grpo,
        "gdpo": lambda members: grpo(members, ddof=rule.ddof),
        "reinforce_plus_plus_baseline": dr_grpo,
    }
    advantages = _by_bucket(values, buckets, centre[rule.estimator], rule.singleton)
    if rule.estimator == "reinforce_plus_plus_baseline":
        return whiten(advantages, ddof=rule.ddof)
    return advantages


def assign(experiences: Sequence[Experience], rule: AdvantageRule) -> list[Floats]:
    """Return the advantage of every turn of every experience, one array [K] an experience.

    A session is one member of its group however many chains it has; all its turns share its advantage. By step, a
    turn is a member of its own bucket, which is how step rewards reach the loss token by token. Zeros where the
    advantages are computed later, token by token.
    """
    if rule.estimator in BY_TOKEN:
        return [np.zeros(len(experience.turn_ids)) for experience in experiences]
    if rule.estimator == "gdpo":
        return gdpo(experiences, rule)
    values: list[float] = []
    buckets: list[Hashable] = []
    sessions: dict[SessionKey, int] = {}
    places: list[list[int]] = []
    for experience in experiences:
        if _by_step(experience, rule):
            places.append(list(range(len(values), len(values) + len(experience.turn_ids))))
            values.extend(experience.turn_returns)
            buckets.extend((experience.group_key, step) for step in experience.turn_steps)
            continue
        if experience.session_key not in sessions:
            sessions[experience.session_key] = len(values)
            values.append(experience.reward)
            buckets.append((experience.group_key, None))
        places.append([sessions[experience.session_key]] * len(experience.turn_ids))
    advantages = estimate(np.asarray(values, np.float64), buckets, rule)
    return [advantages[place] for place in places]


def gdpo(experiences: Sequence[Experience], rule: AdvantageRule) -> list[Floats]:
    """Return Σ_n w_n GRPO(reward n), normalised over the batch: each named reward is compared apart.

    Summed first, rewards of small spread would vanish beside those of large spread. Liu et al. 2026 (GDPO,
    arXiv:2601.05242). Sessions only; step rewards count towards their session's.
    """
    sessions: dict[SessionKey, int] = {}
    for experience in experiences:
        sessions.setdefault(experience.session_key, len(sessions))
    first = {experience.session_key: experience for experience in reversed(experiences)}
    rewards = [rewards_by_name(first[key]) for key in sessions]
    buckets = [first[key].group_key for key in sessions]
    total = np.zeros(len(sessions))
    for name in sorted({name for one in rewards for name in one}):
        values = np.array([one.get(name, 0.0) for one in rewards], np.float64)
        total += rule.reward_weights.get(name, 1.0) * estimate(values, buckets, rule)
    advantages = whiten(total, ddof=rule.ddof)
    return [np.full(len(one.turn_ids), advantages[sessions[one.session_key]]) for one in experiences]


def uniform_groups(experiences: Sequence[Experience], advantages: Sequence[Floats]) -> set[GroupKey]:
    """Return the groups in which no turn has an advantage. They teach nothing and would dilute the mean."""
    telling = {experience.group_key for experience, turns in zip(experiences, advantages, strict=True) if np.any(turns)}
    return {experience.group_key for experience in experiences} - telling


def _by_step(experience: Experience, rule: AdvantageRule) -> bool:
    if rule.group_by == "auto":
        return experience.info.get("credit") == Credit.STEP_WISE
    return rule.group_by == "step"


def _by_bucket(
    values: Floats, buckets: Sequence[Hashable], centre: Callable[[Floats], Floats], singleton: Singleton
) -> Floats:
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, bucket in enumerate(buckets):
        members[bucket].append(index)
    advantages = np.zeros_like(values)
    for indices in members.values():
        bucket_values = values[indices]
        if len(indices) == 1:
            advantages[indices] = bucket_values if singleton == "raw" else 0.0
        elif not _uniform(bucket_values):
            advantages[indices] = centre(bucket_values)
    return advantages


def _uniform(values: Floats) -> bool:
    return bool(np.ptp(values) <= UNIFORM_TOLERANCE * np.abs(values).max())
