"""Single sessions: those without a group, whose rewards are compared with other single sessions of their kind.

A kind is a tenant, what its agents do (their `task_id`, by `kind_pattern`, else their system prompt) and the role of
the chain. The values of a kind are those of the batch and of a window of recent sessions, so that a small batch has a
baseline too. The window is part of the trainer's state. NumPy in float64, no torch, no state.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from turnwise.comparison import Floats, is_uniform
from turnwise.experience import Experience
from turnwise.types import Role, SessionKey

WINDOW = 64
"""Recent values that the window holds of each kind and part. A batch of more sessions hardly depends on them."""
MOST_ROWS = 8192
"""Values that the window holds in all; the oldest ones leave."""
SCALE_FLOOR = 0.25
"""Smallest scale, as a share of the range of the values: no advantage is larger than 1 / SCALE_FLOOR = 4."""

WHOLE = "session"
"""The part of a value that is the reward of a whole session."""

FIRST = "first_of_its_kind"
"""Reason: no other single session of this kind is known yet."""
UNIFORM = "uniform_rewards"
"""Reason: all rewards that are compared are equal."""
AT_BASELINE = "equals_baseline"
"""Reason: the session's reward is exactly the mean of the others."""


class Bucket(NamedTuple):
    """The single sessions that are compared with each other in one respect."""

    kind: str
    part: str
    """`session`, a step, or the name of a reward."""


class Row(NamedTuple):
    """One value of a single session."""

    kind: str
    part: str
    session: str
    """Digest of the session's key."""
    value: float

    @property
    def bucket(self) -> Bucket:
        """What the value is compared with."""
        return Bucket(self.kind, self.part)


PastValues = Mapping[Bucket, Floats]
"""The values of earlier single sessions."""


def is_single(experience: Experience) -> bool:
    """Return whether the session has no group, or a group of one."""
    return bool(experience.info.get("single"))


def bucket_of(experience: Experience, part: str, kind_pattern: str | None) -> Bucket:
    """Return the bucket of a chain of a single session."""
    roles = experience.info.get("roles") or [Role.MAIN]
    names = (experience.tenant, _agent_of(experience, kind_pattern), str(roles[0]))
    return Bucket(_digest("\0".join(names)), part)


def row_of(bucket: Bucket, session: SessionKey, value: float) -> Row:
    """Return the row of a session's value."""
    return Row(*bucket, session_digest(session), float(value))


def session_digest(session: SessionKey) -> str:
    """Return what rows name a session by."""
    return _digest("\0".join(session))


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


def past_values(rows: Iterable[Row], batch: Collection[Row]) -> PastValues:
    """Return the values in the window by bucket, without those of the batch's own sessions."""
    own = {row.session for row in batch}
    found: dict[Bucket, list[float]] = defaultdict(list)
    for row in rows:
        if row.session not in own:
            found[row.bucket].append(row.value)
    return {bucket: np.array(values, np.float64) for bucket, values in found.items()}


def moved_on(rows: Sequence[Row], batch: Sequence[Row]) -> tuple[Row, ...]:
    """Return the window after a batch: its values replace those of the same sessions, and the oldest ones leave."""
    own = {row.session for row in batch}
    known: dict[Bucket, int] = defaultdict(int)
    kept = []
    for row in reversed([*(row for row in rows if row.session not in own), *batch]):
        known[row.bucket] += 1
        if known[row.bucket] <= WINDOW:
            kept.append(row)
    return tuple(reversed(kept[:MOST_ROWS]))


def why_without_advantage(rows: Sequence[Row], batch: Sequence[Row], past: PastValues) -> str:
    """Return why a single session with these rows has no advantage in this batch."""
    pools = []
    for row in rows:
        others = past.get(row.bucket, np.empty(0))
        pools.append(np.concatenate([[other.value for other in batch if other.bucket == row.bucket], others]))
    if all(len(pool) == 1 for pool in pools):
        return FIRST
    return UNIFORM if all(map(is_uniform, pools)) else AT_BASELINE


def _agent_of(experience: Experience, kind_pattern: str | None) -> str:
    """Return the matched part of the task's id, else the digest of the system prompt."""
    found = None if kind_pattern is None else re.search(kind_pattern, experience.eid.task)
    if found is None:
        return f"agent {experience.info.get('agent', '')}"
    return f"task {found.group(1 if found.re.groups else 0)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
