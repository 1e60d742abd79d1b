"""Which values are compared with each other, and the arithmetic that several algorithms share. NumPy in float64.

A *bucket* holds values that are compared: all sessions of a group, all turns at one step of a group, or single sessions
of a kind. A session is one value however many chains it has, and all its turns share its advantage. By step, each turn
is a value of its own, which is how step rewards reach the loss token by token. Legend: N values, K turns of a chain.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

import numpy as np

from trainer.learning.rewards import rewards_by_name
from trainer.learning.singles import WHOLE, Bucket, Row, baseline, bucket_of, is_single, row_of
from turnwise.comparison import STD_EPSILON, Floats, is_uniform
from turnwise.experience import Experience
from turnwise.types import Credit, GroupKey, SessionKey


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """The values of some experiences."""

    values: Floats
    """[N]"""
    buckets: Sequence[Hashable]
    """What each is compared with; a `Bucket` for those of single sessions. [N]"""
    places: Sequence[Sequence[int]]
    """The value of each turn of each experience, as an index. [K] each"""

    def of_turns(self, advantages: Floats) -> list[Floats]:
        """Return the advantages of the turns of each experience from those of the values. [K] each."""
        return [advantages[place] for place in self.places]


def compared(experiences: Sequence[Experience], kind_pattern: str | None = None) -> Compared:
    """Return the values of experiences: rewards of sessions, or returns of turns with step-wise credit."""
    values: list[float] = []
    buckets: list[Hashable] = []
    sessions: dict[tuple[SessionKey, Hashable], int] = {}
    places: list[list[int]] = []
    for experience in experiences:
        if _by_step(experience):
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
    """Return the advantages by bucket; a group with one value has none.

    Args:
        values: What is compared. [N]
        buckets: Which values are compared with each other. [N]
        centre: Returns the advantages of the values of a group.
        past: Values of earlier single sessions.
        is_scaled: Divide those of single sessions by their spread.
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


def bucket_for(experience: Experience, part: int | str | None, kind_pattern: str | None) -> Hashable:
    """Return what a value is compared with: that of a step, of a named reward, or of the whole session (None)."""
    if is_single(experience):
        return bucket_of(experience, WHOLE if part is None else str(part), kind_pattern)
    return experience.group_key, part if isinstance(part, int) else None


def whiten(values: Floats, *, ddof: int = 1) -> Floats:
    """Return the values normalised over the whole batch; zeros where all are equal."""
    if len(values) <= ddof or is_uniform(values):
        return np.zeros_like(values)
    scaled: Floats = (values - values.mean()) / (values.std(ddof=ddof) + STD_EPSILON)
    return scaled


def groups_of(experiences: Sequence[Experience], without: Collection[int]) -> list[list[int]]:
    """Return the experiences of each group, as indices, without some of them."""
    members: dict[GroupKey, list[int]] = defaultdict(list)
    for index, experience in enumerate(experiences):
        if index not in without:
            members[experience.group_key].append(index)
    return list(members.values())


def single_rows(experiences: Sequence[Experience], kind_pattern: str | None) -> list[Row]:
    """Return the values of the single sessions, which later ones of their kind are compared with."""
    rows: dict[Row, None] = {}  # a session with several chains of a kind has one value
    by_turn: list[Row] = []
    for experience in filter(is_single, experiences):
        if _by_step(experience):
            steps = zip(experience.turn_steps, experience.turn_returns, strict=True)
            by_turn += [_row(experience, step, value, kind_pattern) for step, value in steps]
        else:
            rows[_row(experience, WHOLE, experience.reward, kind_pattern)] = None
    return [*rows, *by_turn]


def named_rows(experiences: Sequence[Experience], kind_pattern: str | None) -> list[Row]:
    """Return the values of each named reward of the single sessions."""
    rows: dict[Row, None] = {}
    for experience in filter(is_single, experiences):
        named = rewards_by_name(experience).items()
        rows |= {_row(experience, f"reward {name}", value, kind_pattern): None for name, value in named}
    return list(rows)


def uniform_groups(experiences: Sequence[Experience], advantages: Sequence[Floats]) -> set[GroupKey]:
    """Return the groups in which no turn has an advantage. They teach nothing and would dilute the mean."""
    telling = {experience.group_key for experience, turns in zip(experiences, advantages, strict=True) if np.any(turns)}
    return {experience.group_key for experience in experiences} - telling


def _row(experience: Experience, part: int | str, value: float, kind_pattern: str | None) -> Row:
    return row_of(bucket_of(experience, str(part), kind_pattern), experience.session_key, value)


def _by_step(experience: Experience) -> bool:
    return experience.info.get("credit") == Credit.STEP_WISE
