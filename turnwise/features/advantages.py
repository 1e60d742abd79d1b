"""The advantages of turns as people read them: those that training gave them last, or would give them.

Before training they are those of `grpo` with its default settings. Single sessions have none: their baseline is the
trainer's window of recent sessions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from turnwise.chains import Experience
from turnwise.credit import Floats, is_uniform, normalised
from turnwise.store.experiences import PER_TURN, Shape, Source, experiences, opened
from turnwise.store.policies import names_of_policies
from turnwise.store.selection import SessionFilter
from turnwise.types import GroupKey, SessionStatus

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
        yield _with_advantages(experience, of_group(*experience.group_key, experience.policy_id))


def in_groups(found: Sequence[Experience]) -> Iterator[Experience]:
    """Yield all chains of some groups, of one policy, with the advantages that their turns would get."""
    members: dict[GroupKey, list[Experience]] = defaultdict(list)
    for each in found:
        members[each.group_key].append(each)
    values = {key: _group_values(of) for key, of in members.items()}
    for each in found:
        yield each if each.info["single"] else _with_advantages(each, values[each.group_key])


def _with_advantages(experience: Experience, values: GroupValues) -> Experience:
    if experience.is_by_step:
        found = [values[step][turn] for turn, step in zip(experience.turn_ids, experience.turn_steps, strict=True)]
    else:
        found = [values[None][experience.session_id]] * len(experience.turn_ids)
    return dataclasses.replace(experience, turn_advantages=np.array(found, np.float64))


def _group_values(experiences: Iterable[Experience]) -> GroupValues:
    values: dict[int | None, dict[str, float]] = defaultdict(dict)
    for each in experiences:
        if each.is_by_step:
            for step, turn_id, value in zip(each.turn_steps, each.turn_ids, each.turn_returns, strict=True):
                values[step][turn_id] = float(value)
        else:
            values[None][each.session_id] = each.reward
    return {part: dict(zip(of, _centred(np.array([*of.values()])), strict=True)) for part, of in values.items()}


def _centred(values: Floats) -> Floats:
    return np.zeros_like(values) if len(values) == 1 or is_uniform(values) else normalised(values)
