"""What a session is compared with: its reward as shaped, its group, or for a single session others of its kind.

Named rewards are weighed and overlong sessions shaped; nothing of that is stored. A *bucket* holds values that are
compared: all sessions of a group, all turns at one step of a group, or single sessions of a kind. A session is one
value however many chains it has, and all its turns share its advantage. By step, each turn is a value of its own, which
is how step rewards reach the loss token by token.

Single sessions have no group, and are compared with others of their kind: a tenant, what its agents do (their
`task_id`, by `kind_pattern`, else their system prompt) and the role of the chain. The values of a kind are those of the
batch and of a window of recent sessions, so that a small batch has a baseline too. The window is part of the trainer's
state. NumPy in float64, no torch, no state. Legend: N values, P earlier ones, K turns of a chain.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from trainer.batch.chain import Chain
from turnwise.credit import STD_EPSILON, Floats, is_uniform
from turnwise.settings import FromJson, Settings
from turnwise.types import GroupKey, Json, SessionKey, name_digest

OVERLONG_PENALTY = 1.0
"""Largest penalty of an overlong session: a success that is too long is worth a failure, where rewards are 0 or 1."""
OVERLONG_SHARE = 0.5
WINDOW = 64
"""Recent values that the window holds of each kind and part. A batch of more sessions hardly depends on them."""
MOST_ROWS = 8192
"""Values that the window holds in all; the oldest ones leave."""
SCALE_FLOOR = 0.25
"""Smallest scale, as a share of the range of the values: no advantage is larger than 1 / SCALE_FLOOR = 4."""

WHOLE = "session"

FIRST = "first_of_its_kind"
UNIFORM = "uniform_rewards"
AT_BASELINE = "equals_baseline"


class RewardRule(Settings):
    """How the reward of a session is made from what was posted."""

    reward_weights: Annotated[dict[str, float], FromJson] = Field(default_factory=dict)
    """Weight of each reward name, for sessions with propagated credit; names that are not listed weigh 1."""
    overlong_tokens: int | None = Field(default=None, ge=1)
    """A session with this many sampled tokens or more has a reward that is less by 1. The penalty rises linearly from 0
    at half of them. With step-wise credit its last step gets the penalty, and the steps before by γ. None turns it
    off."""
    overlong_mask: bool = False
    """Do not train sessions with a turn that ended at the token limit; they still count in their group's baseline."""


def shape_rewards(
    experiences: Sequence[Chain],
    rule: RewardRule,
    combine: Callable[[Mapping[str, float], Json], float | None],
) -> list[Chain]:
    """Return the experiences with the rewards and returns that are trained.

    `combine` returns a session's reward from its rewards by name and its metadata; None: by the rule.
    """
    lengths: dict[SessionKey, int] = defaultdict(int)
    for experience in experiences:
        lengths[experience.session_key] += int(experience.loss_mask.sum())
    shaped = []
    for experience in experiences:
        own = combine(experience.named_rewards, experience.metadata)
        if own is None and rule.reward_weights:
            own = sum(rule.reward_weights.get(name, 1.0) * value for name, value in experience.named_rewards.items())
        reward = experience.reward if own is None else float(own)
        penalty = overlong_penalty(lengths[experience.session_key], rule)
        changed = reward != experience.reward or penalty
        shaped.append(_with_reward(experience, reward, penalty) if changed else experience)
    return shaped


def overlong_penalty(num_tokens: int, rule: RewardRule) -> float:
    """Return min(max((L − (L_max − L_buffer)) / L_buffer, 0), 1) · penalty.

    Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 13, soft overlong punishment.
    """
    if rule.overlong_tokens is None:
        return 0.0
    buffer = rule.overlong_tokens * OVERLONG_SHARE
    over = num_tokens - (rule.overlong_tokens - buffer)
    return OVERLONG_PENALTY * min(max(over / buffer, 0.0), 1.0)


def _with_reward(experience: Chain, reward: float, penalty: float) -> Chain:
    """Return the experience under another session reward; step by step, the penalty is one more line of the session."""
    if experience.is_by_step:
        rewards, returns = (experience.turn_rewards, experience.turn_returns) - penalty * experience.turn_shares
        return dataclasses.replace(experience, reward=reward - penalty, turn_returns=returns, turn_rewards=rewards)
    returns = np.full(len(experience.turn_ids), reward - penalty)
    return dataclasses.replace(experience, reward=reward - penalty, turn_returns=returns, turn_rewards=returns)


class Bucket(NamedTuple):
    """The single sessions that are compared with each other in one respect."""

    kind: str
    part: str
    """`session`, a step, or the name of a reward."""


class SingleValue(NamedTuple):
    """One value of a single session."""

    kind: str
    part: str
    session: str
    value: float

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.kind, self.part)


PastValues = Mapping[Bucket, Floats]


def bucket_of(experience: Chain, part: str, kind_pattern: str | None) -> Bucket:
    names = (experience.tenant, _agent_of(experience, kind_pattern), experience.role)
    return Bucket(hashlib.sha256("\0".join(names).encode()).hexdigest()[:16], part)


def baseline(values: Floats, past: Floats, *, is_scaled: bool) -> Floats:
    """Return (x_i − mean of all others) / s: the advantage of each value over the others and the past ones.

    Leave-one-out, so that a value is not its own baseline: RLOO, Ahmadian et al. 2024 (arXiv:2402.14740), over
    sessions of one kind in place of samples of one prompt. A baseline over sessions of different prompts and its scale
    are those of REINFORCE++, Hu et al. 2025 (arXiv:2501.03262). s = max(std, range / 4) of all values, past ones
    included: the scale of a whole kind, since that of a single task favours the easy and the hard ones (Dr. GRPO, Liu
    et al. 2025, arXiv:2503.20783, section 3.1). It is the std and not the median deviation, which is 0 for most
    rewards of 0 and 1; the floor bounds an advantage where success is rare. Zeros without another value, and where all
    are equal.

    Args:
        values: Of the batch. [N]
        past: Of sessions before it. [P]
        is_scaled: Divide by s, as algorithms do whose groups are divided by their std.
    """
    pool = np.concatenate([values, past])
    if len(pool) == 1 or is_uniform(pool):
        return np.zeros_like(values)
    centred: Floats = values - (pool.sum() - values) / (len(pool) - 1)
    if not is_scaled:
        return centred
    scaled: Floats = centred / max(float(pool.std(ddof=1)), SCALE_FLOOR * float(np.ptp(pool)))
    return scaled


def past_values(rows: Iterable[SingleValue], batch: Collection[SingleValue]) -> PastValues:
    """Return the values in the window by bucket, without those of the batch's own sessions."""
    own = {row.session for row in batch}
    found: dict[Bucket, list[float]] = defaultdict(list)
    for row in rows:
        if row.session not in own:
            found[row.bucket].append(row.value)
    return {bucket: np.array(values, np.float64) for bucket, values in found.items()}


def moved_on(rows: Sequence[SingleValue], batch: Sequence[SingleValue]) -> tuple[SingleValue, ...]:
    """Return the window after a batch: its values replace those of the same sessions, and the oldest ones leave."""
    own = {row.session for row in batch}
    known: dict[Bucket, int] = defaultdict(int)
    kept = []
    for row in reversed([*(row for row in rows if row.session not in own), *batch]):
        known[row.bucket] += 1
        if known[row.bucket] <= WINDOW:
            kept.append(row)
    return tuple(reversed(kept[:MOST_ROWS]))


def why_without_advantage(rows: Sequence[SingleValue], batch: Sequence[SingleValue], past: PastValues) -> str:
    pools = []
    for row in rows:
        others = past.get(row.bucket, np.empty(0))
        pools.append(np.concatenate([[other.value for other in batch if other.bucket == row.bucket], others]))
    if all(len(pool) == 1 for pool in pools):
        return FIRST
    return UNIFORM if all(map(is_uniform, pools)) else AT_BASELINE


def _agent_of(experience: Chain, kind_pattern: str | None) -> str:
    found = None if kind_pattern is None else re.search(kind_pattern, experience.task_id)
    if found is None:
        return f"agent {experience.agent}"
    return f"task {found.group(1 if found.re.groups else 0)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """The values of some experiences."""

    values: Floats
    buckets: Sequence[Hashable]
    """What each is compared with; a `Bucket` for those of single sessions. [N]"""
    places: Sequence[Sequence[int]]
    """The value of each turn of each experience, as an index. [K] each"""

    def of_turns(self, advantages: Floats) -> list[Floats]:
        return [advantages[place] for place in self.places]


def compared(experiences: Sequence[Chain], kind_pattern: str | None = None) -> Compared:
    """Return the values of experiences: rewards of sessions, or returns of turns with step-wise credit."""
    values: list[float] = []
    buckets: list[Hashable] = []
    sessions: dict[tuple[SessionKey, Hashable], int] = {}
    places: list[list[int]] = []
    for experience in experiences:
        if experience.is_by_step:
            places.append(list(range(len(values), len(values) + len(experience.turn_ids))))
            values.extend(experience.turn_returns)
            buckets.extend(bucket_for(experience, step, kind_pattern) for step in experience.turn_steps)
            continue
        bucket = bucket_for(experience, None, kind_pattern)
        member = (experience.session_key, bucket)
        if member not in sessions:
            sessions[member] = len(values)
            values.append(experience.reward)
            buckets.append(bucket)
        places.append([sessions[member]] * len(experience.turn_ids))
    return Compared(np.asarray(values, np.float64), buckets, places)


def by_bucket(
    values: Floats,
    buckets: Sequence[Hashable],
    centre: Callable[[Floats], Floats],
    past: Mapping[Bucket, Floats] | None = None,
    *,
    is_scaled: bool = False,
) -> Floats:
    """Return the advantages by bucket; a group with one value has none. [N].

    `centre` compares the values of a group. Those of single sessions are compared with `past` too, and divided by their
    spread where `is_scaled`.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, bucket in enumerate(buckets):
        members[bucket].append(index)
    advantages = np.zeros_like(values)
    for bucket, indices in members.items():
        bucket_values = values[indices]
        if isinstance(bucket, Bucket):
            before = (past or {}).get(bucket, np.empty(0))
            advantages[indices] = baseline(bucket_values, before, is_scaled=is_scaled)
        elif len(indices) > 1 and not is_uniform(bucket_values):
            advantages[indices] = centre(bucket_values)
    return advantages


def bucket_for(experience: Chain, part: int | str | None, kind_pattern: str | None) -> Hashable:
    """Return what a value is compared with: that of a step, of a named reward, or of the whole session (None)."""
    if experience.is_single:
        return bucket_of(experience, WHOLE if part is None else str(part), kind_pattern)
    return experience.group_key, part if isinstance(part, int) else None


def whiten(values: Floats, *, ddof: int = 1) -> Floats:
    """Return the values normalised over the whole batch; zeros where all are equal."""
    if len(values) <= ddof or is_uniform(values):
        return np.zeros_like(values)
    scaled: Floats = (values - values.mean()) / (values.std(ddof=ddof) + STD_EPSILON)
    return scaled


def groups_of(experiences: Sequence[Chain], without: Collection[int]) -> list[list[int]]:
    members: dict[GroupKey, list[int]] = defaultdict(list)
    for index, experience in enumerate(experiences):
        if index not in without:
            members[experience.group_key].append(index)
    return list(members.values())


def single_values(experiences: Sequence[Chain], kind_pattern: str | None) -> list[SingleValue]:
    rows: dict[SingleValue, None] = {}  # a session with several chains of a kind has one value
    by_turn: list[SingleValue] = []
    for experience in (one for one in experiences if one.is_single):
        if experience.is_by_step:
            steps = zip(experience.turn_steps, experience.turn_returns, strict=True)
            by_turn += [value_of(experience, step, value, kind_pattern) for step, value in steps]
        else:
            rows[value_of(experience, WHOLE, experience.reward, kind_pattern)] = None
    return [*rows, *by_turn]


def uniform_groups(experiences: Sequence[Chain], advantages: Sequence[Floats]) -> set[GroupKey]:
    telling = {experience.group_key for experience, turns in zip(experiences, advantages, strict=True) if np.any(turns)}
    return {experience.group_key for experience in experiences} - telling


def value_of(experience: Chain, part: int | str, value: float, kind_pattern: str | None) -> SingleValue:
    bucket = bucket_of(experience, str(part), kind_pattern)
    return SingleValue(*bucket, name_digest(experience.session_key), float(value))
