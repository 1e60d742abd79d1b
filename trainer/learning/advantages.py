"""Rewards to advantages: each estimator a few lines with its paper. NumPy in float64, no torch, no state.

An estimator gets one *bucket* of values that are compared with each other. `assign` alone decides what a bucket is:
all sessions of a group, or all turns at one step of a group. So each estimator serves both. Legend: N values, G
members of one bucket, K turns of one experience.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import field_validator

from trainer.learning.rewards import RewardRule, rewards_by_name
from trainer.learning.singles import (
    WHOLE,
    Bucket,
    Floats,
    Row,
    baseline,
    bucket_of,
    is_single,
    is_uniform,
    past_values,
    row_of,
)
from turnwise.experience import Experience
from turnwise.named_object import load_object
from turnwise.types import Credit, GroupKey, SessionKey

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
Singleton = Literal["baseline", "zero"]

BY_TOKEN = ("gae", "teacher")
"""Estimators that need a model: their advantages are computed token by token once the batch is built."""

WITHOUT_GROUPS = ("reinforce", "reinforce_plus_plus")
"""Estimators that compare no group: single sessions are like all others."""
SCALED = ("grpo", "gdpo")
"""Estimators whose groups have a standard deviation of 1: single sessions are scaled too, so that both count alike."""

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
    singleton: Singleton = "baseline"
    """Sessions without a group: `baseline` compares them with other single sessions of their kind, of the batch and of
    a window of recent ones; `zero` does not train them. Estimators that compare no group treat them like all others."""
    kind_pattern: str | None = None
    """Regular expression searched in the `task_id` of single sessions: those with the same match, or the same first
    group of it, are of one kind. None, and sessions without a match: by the agent's system prompt."""

    @field_validator("kind_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"kind_pattern {value!r} is no regular expression: {error}") from error
        return value


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
    if len(values) <= ddof or is_uniform(values):
        return np.zeros_like(values)
    normalised: Floats = (values - values.mean()) / (values.std(ddof=ddof) + epsilon)
    return normalised


def estimate(
    values: Floats, buckets: Sequence[Hashable], rule: AdvantageRule, past: Mapping[Bucket, Floats] | None = None
) -> Floats:
    """Return the advantage of each value.

    Args:
        values: What is compared. [N]
        buckets: Which values are compared with each other; those of single sessions are a `Bucket`. [N]
        rule: Estimator and conventions.
        past: Values of earlier single sessions.
    """
    if rule.custom_advantage is not None:
        custom = load_object(rule.custom_advantage, "custom_advantage")
        return _by_bucket(values, buckets, lambda members: np.asarray(custom(members), np.float64), rule, past or {})
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
    advantages = _by_bucket(values, buckets, centre[rule.estimator], rule, past or {})
    if rule.estimator == "reinforce_plus_plus_baseline":
        return whiten(advantages, ddof=rule.ddof)
    return advantages


def assign(experiences: Sequence[Experience], rule: AdvantageRule, window: Sequence[Row] = ()) -> list[Floats]:
    """Return the advantage of every turn of every experience, one array [K] an experience.

    A session is one member of its group however many chains it has; all its turns share its advantage. By step, a
    turn is a member of its own bucket, which is how step rewards reach the loss token by token. Zeros where the
    advantages are computed later, token by token. `window` holds values of earlier single sessions.
    """
    if rule.estimator in BY_TOKEN:
        return [np.zeros(len(experience.turn_ids)) for experience in experiences]
    past = past_values(window, single_rows(experiences, rule))
    if rule.estimator == "gdpo":
        return gdpo(experiences, rule, past)
    values: list[float] = []
    buckets: list[Hashable] = []
    sessions: dict[tuple[SessionKey, Hashable], int] = {}
    places: list[list[int]] = []
    for experience in experiences:
        if _by_step(experience, rule):
            places.append(list(range(len(values), len(values) + len(experience.turn_ids))))
            values.extend(experience.turn_returns)
            buckets.extend(_bucket(experience, step, rule) for step in experience.turn_steps)
            continue
        bucket = _bucket(experience, None, rule)
        member = (experience.session_key, bucket)
        if member not in sessions:
            sessions[member] = len(values)
            values.append(experience.reward)
            buckets.append(bucket)
        places.append([sessions[member]] * len(experience.turn_ids))
    advantages = estimate(np.asarray(values, np.float64), buckets, rule, past)
    return [advantages[place] for place in places]


def gdpo(experiences: Sequence[Experience], rule: AdvantageRule, past: Mapping[Bucket, Floats]) -> list[Floats]:
    """Return Σ_n w_n GRPO(reward n), normalised over the batch: each named reward is compared apart.

    Summed first, rewards of small spread would vanish beside those of large spread. Liu et al. 2026 (GDPO,
    arXiv:2601.05242). Sessions only; step rewards count towards their session's.
    """
    sessions: dict[tuple[SessionKey, Hashable], int] = {}
    members = [(experience.session_key, _bucket(experience, None, rule)) for experience in experiences]
    for member in members:
        sessions.setdefault(member, len(sessions))
    first = dict(reversed(list(zip(members, experiences, strict=True))))
    rewards = [rewards_by_name(first[member]) for member in sessions]
    total = np.zeros(len(sessions))
    for name in sorted({name for one in rewards for name in one}):
        values = np.array([one.get(name, 0.0) for one in rewards], np.float64)
        buckets = [_bucket(first[member], _named(name), rule) for member in sessions]
        total += rule.reward_weights.get(name, 1.0) * estimate(values, buckets, rule, past)
    advantages = whiten(total, ddof=rule.ddof)
    return [
        np.full(len(one.turn_ids), advantages[sessions[member]])
        for one, member in zip(experiences, members, strict=True)
    ]


def single_rows(experiences: Sequence[Experience], rule: AdvantageRule) -> list[Row]:
    """Return the values of the single sessions, which later ones of their kind are compared with."""
    if rule.singleton == "zero" or rule.estimator in (*BY_TOKEN, *WITHOUT_GROUPS):
        return []
    rows: dict[Row, None] = {}  # a session with several chains of a kind has one value
    by_turn: list[Row] = []
    for experience in experiences:
        if not is_single(experience):
            continue
        if rule.estimator == "gdpo":
            parts = [(_named(name), value) for name, value in rewards_by_name(experience).items()]
        elif _by_step(experience, rule):
            steps = zip(experience.turn_steps, experience.turn_returns, strict=True)
            by_turn += [_row(experience, step, value, rule) for step, value in steps]
            continue
        else:
            parts = [(WHOLE, experience.reward)]
        rows |= {_row(experience, part, value, rule): None for part, value in parts}
    return [*rows, *by_turn]


def uniform_groups(experiences: Sequence[Experience], advantages: Sequence[Floats]) -> set[GroupKey]:
    """Return the groups in which no turn has an advantage. They teach nothing and would dilute the mean."""
    telling = {experience.group_key for experience, turns in zip(experiences, advantages, strict=True) if np.any(turns)}
    return {experience.group_key for experience in experiences} - telling


def _named(name: str) -> str:
    return f"reward {name}"


def _row(experience: Experience, part: int | str, value: float, rule: AdvantageRule) -> Row:
    return row_of(bucket_of(experience, str(part), rule.kind_pattern), experience.session_key, value)


def _bucket(experience: Experience, part: int | str | None, rule: AdvantageRule) -> Hashable:
    """Return what a value is compared with: that of a step, of a named reward, or of the whole session (None)."""
    if is_single(experience) and rule.singleton == "baseline":
        return bucket_of(experience, WHOLE if part is None else str(part), rule.kind_pattern)
    return experience.group_key, part if isinstance(part, int) else None


def _by_step(experience: Experience, rule: AdvantageRule) -> bool:
    if rule.group_by == "auto":
        return experience.info.get("credit") == Credit.STEP_WISE
    return rule.group_by == "step"


def _by_bucket(
    values: Floats,
    buckets: Sequence[Hashable],
    centre: Callable[[Floats], Floats],
    rule: AdvantageRule,
    past: Mapping[Bucket, Floats],
) -> Floats:
    """Return the advantages by bucket; a group with one value has none."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, bucket in enumerate(buckets):
        members[bucket].append(index)
    advantages = np.zeros_like(values)
    is_scaled = rule.custom_advantage is not None or rule.estimator in SCALED
    for bucket, indices in members.items():
        bucket_values = values[indices]
        if isinstance(bucket, Bucket):
            advantages[indices] = baseline(bucket_values, past.get(bucket, np.empty(0)), is_scaled=is_scaled)
        elif len(indices) > 1 and not is_uniform(bucket_values):
            advantages[indices] = centre(bucket_values)
    return advantages
