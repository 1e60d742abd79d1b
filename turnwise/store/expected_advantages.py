"""The advantages that turns would get in training, for people who check rewards before they train.

They are those of `grpo` with its default settings, from the sessions that are over now. Single sessions have none:
their baseline is the trainer's window of recent sessions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import sqlalchemy as sa

from turnwise.chains import Experience
from turnwise.credit import Floats, is_uniform, normalised
from turnwise.store.experiences import PER_TURN, Shape, experiences
from turnwise.store.session_filter import SessionFilter
from turnwise.types import Credit, SessionStatus

NUM_GROUPS = 64
"""Groups whose advantages are kept while experiences are read: sessions of a group are mostly stored together."""

Values = Mapping[int | None, Mapping[str, float]]
"""The advantages of a group: by step and turn, or, under None, by session."""


def with_advantages(conn: sa.Connection, wanted: SessionFilter, shape: Shape = PER_TURN) -> Iterator[Experience]:
    """Yield experiences as `experiences` does, with the advantages that their turns got last, or would get."""

    @functools.lru_cache(NUM_GROUPS)
    def of_group(tenant: str, group_id: str) -> Values:
        of_turns = dataclasses.replace(shape, merge="turn")
        return _compared(experiences(conn, SessionFilter(tenant=tenant, group_id=group_id), of_turns))

    for experience in experiences(conn, wanted, shape):
        if experience.turn_advantages is not None or experience.info["single"] or _is_open(experience):
            yield experience
            continue
        values = of_group(*experience.group_key)
        if _is_by_step(experience):
            found = [values[step][turn] for turn, step in zip(experience.turn_ids, experience.turn_steps, strict=True)]
        else:
            found = [values[None][experience.session_id]] * len(experience.turn_ids)
        yield dataclasses.replace(experience, turn_advantages=np.array(found, np.float64))


def _compared(turns: Iterable[Experience]) -> Values:
    """Return the advantages of a group's turns."""
    values: dict[int | None, dict[str, float]] = defaultdict(dict)
    for turn in turns:
        if _is_by_step(turn):
            values[turn.turn_steps[0]][turn.turn_ids[0]] = float(turn.turn_returns[0])
        else:
            values[None][turn.session_id] = turn.reward
    return {part: dict(zip(of, _centred(np.array([*of.values()])), strict=True)) for part, of in values.items()}


def _centred(values: Floats) -> Floats:
    return np.zeros_like(values) if len(values) == 1 or is_uniform(values) else normalised(values)


def _is_by_step(experience: Experience) -> bool:
    return bool(experience.info["credit"] == Credit.STEP_WISE)


def _is_open(experience: Experience) -> bool:
    return bool(experience.info["status"] == SessionStatus.OPEN.value)
