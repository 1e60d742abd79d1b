"""Algorithms by name, and what they make of experiences, for the trainer's tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.algorithms.algorithm import Algorithm, select
from trainer.algorithms.loading import load
from trainer.batch.advantages import SingleValue
from trainer.batch.selection import Selection, SelectionRule, offer
from turnwise.chains import Experience
from turnwise.credit import Floats


def algorithm(name: str = "grpo", **settings: Any) -> Algorithm:
    return load({"name": name, **settings})


def assigned(experiences: Sequence[Experience], name: str, **settings: Any) -> list[Floats]:
    chosen = algorithm(name, **settings)
    offered = offer(experiences, keys_of(experiences), SelectionRule(), (), chosen.reward)
    return chosen.assign(offered, {})


def selected(
    experiences: Sequence[Experience], chosen: Algorithm, window: Sequence[SingleValue] = (), **rule: Any
) -> Selection:
    return select(experiences, keys_of(experiences), chosen, SelectionRule(**rule), window)


def keys_of(experiences: Sequence[Experience]) -> list[tuple[str, str]]:
    return sorted({each.group_key for each in experiences})


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, atol=tolerance, rtol=0)
