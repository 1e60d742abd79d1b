"""The advantages of turns as people read them: those that training gave them last, or would give them.

Before training they are those of `grpo` with its default settings. Single sessions have none: their baseline is the
trainer's window of recent sessions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from turnwise.chains import Experience
from turnwise.credit import Floats, is_uniform, normalised
from turnwise.store.experiences import PER_TURN, Shape, Source, experiences, opened
from turnwise.store.policies import names_of_policies
from turnwise.store.selection import SessionFilter
from turnwise.types import SessionStatus

NUM_GROUPS = 64
"""Groups whose advantages are kept during a reading: sessions of a group are mostly stored together."""
GroupValues = Mapping[int | None, Mapping[str, float]]
"""The advantages of a group: by step and turn, or, under None, by session."""


def with_advantages(source: Source, wanted: SessionFilter, shape: Shape = PER_TURN) -> Iterator[Experience]:
    """Yield experiences as `experiences` does, with the advantages that their turns got last, or would get.

    Those of one policy, where the filter names it; each has its policy's name.
    """
    with opened(source) as conn:
        names = names_of_policies(conn)

    @functools.lru_cache(NUM_GROUPS)
    def of_group(tenant: str, group_id: str, policy_id: int) -> GroupValues:
        of_turns = dataclasses.replace(shape, merge="turn", policy_id=policy_id)
        in_group = SessionFilter(tenant=tenant, group_id=group_id, train=wanted.train)
        return _group_values(experiences(source, in_group, of_turns))

    for each in experiences(source, wanted, shape):
        experience = dataclasses.replace(each, policy=names.get(each.policy_id))
        if wanted.policy not in (None, experience.policy):
            continue
        is_open = experience.info["status"] == SessionStatus.OPEN.value
        if experience.turn_advantages is not None or experience.info["single"] or is_open:
            yield experience
            continue
        values = of_group(*experience.group_key, experience.policy_id)
        if experience.is_by_step:
            found = [values[step][turn] for turn, step in zip(experience.turn_ids, experience.turn_steps, strict=True)]
        else:
            found = [values[None][experience.session_id]] * len(experience.turn_ids)
        yield dataclasses.replace(experience, turn_advantages=np.array(found, np.float64))


def _group_values(turns: Iterable[Experience]) -> GroupValues:
    values: dict[int | None, dict[str, float]] = defaultdict(dict)
    for turn in turns:
        if turn.is_by_step:
            values[turn.turn_steps[0]][turn.turn_ids[0]] = float(turn.turn_returns[0])
        else:
            values[None][turn.session_id] = turn.reward
    return {part: dict(zip(of, _centred(np.array([*of.values()])), strict=True)) for part, of in values.items()}


def _centred(values: Floats) -> Floats:
    return np.zeros_like(values) if len(values) == 1 or is_uniform(values) else normalised(values)
