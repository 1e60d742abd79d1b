"""How often a result is looked at, and how wide its interval is for that.

Somebody who looks after every session until an interval excludes 0 finds that it does, sooner or later, also where
nothing changed. An interval that holds at all times (`AnyTime`) may be looked at so; one for a number of looks that is
known beforehand (`Looks`) is narrower.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Protocol

ALPHA = 0.05
"""The chance, by default, that the truth lies outside of an interval at any look."""
NARROWEST_AT = 500
MIN_NUM = 8
"""Values that an interval of a mean needs; the standard error of fewer is no measure."""


class Confidence(Protocol):
    """Turns a standard error into half the width of an interval."""

    def margin(self, error: float, num: int, freedom: float) -> float:
        """Return half the width for a standard error of `num` values with these degrees of freedom."""


@dataclasses.dataclass(frozen=True, slots=True)
class Looks:
    """The interval is looked at `num` times at most; each look spends an equal part of `alpha` (Bonferroni)."""

    alpha: float = ALPHA
    num: int = 1

    @property
    def of_one(self) -> float:
        """What a single look spends."""
        return self.alpha / self.num

    def margin(self, error: float, num: int, freedom: float) -> float:
        return error * student(self.of_one, freedom)


@dataclasses.dataclass(frozen=True, slots=True)
class AnyTime:
    """The interval holds at all times at once with probability 1 − α: an asymptotic confidence sequence.

    Waudby-Smith et al. 2021 (arXiv:2103.06476), theorem 2.2: with n values and the standard error s, on each side
    s · √(2 (n ρ² + 1) / (n ρ²) · log(√(n ρ² + 1) / α)). ρ makes it narrowest at `narrowest_at` values. It is so wide
    where values are few that it needs no widening by Student's distribution.
    """

    alpha: float = ALPHA
    narrowest_at: int = NARROWEST_AT

    def margin(self, error: float, num: int, freedom: float) -> float:
        log_alpha = -2 * math.log(self.alpha)
        n_rho_2 = num * (log_alpha + math.log(log_alpha) + 1) / self.narrowest_at
        return error * math.sqrt(2 * (n_rho_2 + 1) / n_rho_2 * math.log(math.sqrt(n_rho_2 + 1) / self.alpha))


def spent(alpha: float, look: int) -> float:
    """Return what the `look`-th of an unknown number of looks may spend (first: 1): α / (k (k + 1)), α over all."""
    return alpha / (look * (look + 1))


def student(alpha: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t: |t| lies beyond it with probability α.

    Exact for one and two degrees of freedom; from three on by the expansion of Fisher and Cornish 1960 in powers of
    1 / freedom, within 0.1 % from seven on at α = 0.05.
    """
    if freedom < 1:
        return math.inf
    if freedom < 2:
        return 1 / math.tan(math.pi * alpha / 2)
    if freedom < 3:
        return math.sqrt(2 / (alpha * (2 - alpha)) - 2)
    z = statistics.NormalDist().inv_cdf(1 - alpha / 2)
    if math.isinf(freedom):
        return z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
