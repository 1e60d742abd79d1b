"""Whether a version answers some examples worse than another one, from how many of its answers to each are right.

A version may lose a few examples and gain as many others, so gains do not make up for losses here: each example counts
the square of the share of right answers that it lost. Squares find a few examples that are lost among many that answer
now so and now so, where a sum of shares, or the sign test of all pairs of answers, does not (bench/example_gate.py).
Legend: A answers of both versions to an example, R of them right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

MOST_PLACES = 10**6
"""Length of the exact law; where losses have more possible values, they are rounded down to so many."""


class Right(NamedTuple):
    """How many answers to an example are right, of how many."""

    right: int
    num: int

    @property
    def share(self) -> float:
        return self.right / self.num


def losses_test(newer: Sequence[Right], older: Sequence[Right]) -> float:
    """Return the exact chance of losses at least as large if no example's chance to be answered right had fallen.

    Item by item, each of `newer` beside its own of `older`. Given R right ones of all A answers to an example, which
    of them are the newer version's is chance (Fisher 1935): the number is hypergeometric, and the examples are
    independent of each other. With one answer a version it is McNemar's exact test.
    """
    pairs = [(new, old) for new, old in zip(newer, older, strict=True) if new.num and old.num]
    scale = math.lcm(*(math.lcm(new.num, old.num) for new, old in pairs))
    step = max(1, math.ceil(len(pairs) * scale**2 / MOST_PLACES))
    law, observed = np.ones(1), 0
    for new, old in pairs:
        of_pair = _law(new, old, scale, step)
        wider = np.zeros(len(law) + max(of_pair))
        for lost, chance in of_pair.items():
            wider[lost : lost + len(law)] += chance * law
        law, observed = wider, observed + _lost(new.share - old.share, scale, step)
    return float(min(1.0, law[observed:].sum()))


def _law(new: Right, old: Right, scale: int, step: int) -> Mapping[int, float]:
    """Return the chance of each loss, given how many answers of both are right."""
    right, num = new.right + old.right, new.num + old.num
    every, law = math.comb(num, right), dict[int, float]()
    for drawn in range(max(0, right - old.num), min(right, new.num) + 1):
        lost = _lost(drawn / new.num - (right - drawn) / old.num, scale, step)
        law[lost] = law.get(lost, 0.0) + math.comb(new.num, drawn) * math.comb(old.num, right - drawn) / every
    return law


def _lost(gained_share: float, scale: int, step: int) -> int:
    return round(max(0.0, -gained_share) * scale) ** 2 // step
