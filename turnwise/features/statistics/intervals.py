"""Intervals of means, differences, pairs and shares.

Where the values are bounded (`bounds`), two ghosts are added: one more value at each bound. They keep an interval from
trusting a bound that it hardly saw: eight rewards of 0 say little about a reward that is 1 in one of ten sessions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from turnwise.features.statistics.confidence import AnyTime, Confidence, Looks

Values = Sequence[float] | npt.NDArray[np.float64]
Bounds = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where the truth lies; `error` is its standard error, `num` the values behind it."""

    mean: float
    low: float
    high: float
    error: float
    num: int

    def is_above(self, limit: float) -> bool:
        """Whether the truth is above the limit: superior for 0, non-inferior for a negative margin."""
        return self.low > limit

    def is_below(self, limit: float) -> bool:
        return self.high < limit


def mean(values: Values, confidence: Confidence, bounds: Bounds | None = None) -> Interval:
    """Return the mean of independent values."""
    sample = np.asarray(values, np.float64)
    centre, variance, num = _moments(sample, bounds)
    error = math.sqrt(variance / max(1, num))
    estimate = float(sample.mean()) if len(sample) else centre
    return _interval(estimate, centre, error, len(sample), max(0, num - 1), confidence)


def shown_margin(values: Values) -> float:
    """Return half of the 95 % interval that lists and charts show beside a mean: 1.96 standard errors."""
    sample = np.asarray(values, np.float64)
    return 1.96 * math.sqrt(_moments(sample, None)[1] / len(sample))


def difference(newer: Values, older: Values, confidence: Confidence, bounds: Bounds | None = None) -> Interval:
    """Return mean(newer) − mean(older) of two independent samples, with Welch's error and degrees of freedom."""
    samples = [_moments(np.asarray(values, np.float64), bounds) for values in (newer, older)]
    parts = [variance / max(1, num) for _, variance, num in samples]
    error = math.sqrt(sum(parts))
    down = sum(part**2 / max(1, num - 1) for part, (_, _, num) in zip(parts, samples, strict=True))
    freedom = sum(parts) ** 2 / down if down > 0 else min(num for *_, num in samples) - 1
    centre = samples[0][0] - samples[1][0]
    estimate = float(np.mean(newer) - np.mean(older)) if len(newer) and len(older) else centre
    return _interval(estimate, centre, error, len(newer) + len(older), freedom, confidence)


def paired(newer: Values, older: Values, confidence: Confidence, bounds: Bounds | None = None) -> Interval:
    """Return the mean of newer − older, item by item; `bounds` are those of a single value."""
    both = np.asarray(newer, np.float64) - np.asarray(older, np.float64)
    width = None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    return mean(both, confidence, width)


def predicted_mean(
    rated: Values, predicted_of_rated: Values, predicted: Values, confidence: Confidence, bounds: Bounds | None = None
) -> Interval:
    """Return the mean of all items of which few are rated and the others predicted; unbiased whatever predicts.

    Prediction-powered inference (Angelopoulos et al. 2023, arXiv:2301.09633) with the weight λ of their power tuning
    (2311.01453): mean(λ f) over the unrated + mean(y − λ f) over the rated, which were drawn at random.
    """
    ratings, of_rated, of_all = (np.asarray(values, np.float64) for values in (rated, predicted_of_rated, predicted))
    weight = power_tuned(ratings, of_rated, len(of_all))
    left, left_variance, num = _moments(ratings - weight * of_rated, _shifted(bounds, weight))
    spread = float(of_all.var(ddof=1)) if len(of_all) > 1 else 0.0
    error = math.sqrt(left_variance / max(1, num) + weight**2 * spread / max(1, len(of_all)))
    by_prediction = weight * float(of_all.mean()) if len(of_all) else 0.0
    estimate = (float((ratings - weight * of_rated).mean()) if len(ratings) else left) + by_prediction
    return _interval(estimate, left + by_prediction, error, len(ratings), num - 1, confidence)


def share(hits: int, num: int, confidence: Looks | AnyTime) -> Interval:
    """Return the share of hits among independent trials, exactly.

    Clopper and Pearson's interval for a number of looks; for all times the sequence that a uniform mixture of the
    binomial likelihoods gives by Ville's inequality (Robbins 1970).
    """
    estimate = hits / num if num else 0.5
    error = math.sqrt(estimate * (1 - estimate) / max(1, num))
    if isinstance(confidence, Looks):
        half = confidence.of_one / 2
        low = _boundary(lambda p: _at_least(hits, num, p) > half, 0.0, estimate) if hits else 0.0
        high = _boundary(lambda p: _at_least(num - hits, num, 1 - p) <= half, estimate, 1.0) if hits < num else 1.0
        return Interval(estimate, low, high, error, num)
    mixture = -math.log(num + 1) - _log_choose(num, hits)

    def is_inside(p: float) -> bool:
        log_p = (hits * math.log(p) if hits else 0.0) + ((num - hits) * math.log1p(-p) if hits < num else 0.0)
        return mixture - log_p < -math.log(confidence.alpha)

    low = _boundary(is_inside, 1e-12, estimate) if hits else 0.0
    high = _boundary(lambda p: not is_inside(p), estimate, 1 - 1e-12) if hits < num else 1.0
    return Interval(estimate, low, high, error, num)


def sign_test(gains: int, losses: int) -> float:
    """Return the exact chance of at least so many losses among changed pairs if losses were as likely as gains.

    One-sided; for pairs of a right and a wrong answer it is McNemar's exact test.
    """
    return _at_least(losses, gains + losses, 0.5)


def _moments(sample: npt.NDArray[np.float64], bounds: Bounds | None) -> tuple[float, float, int]:
    """Return mean, variance and number, with the ghosts."""
    if bounds is not None:
        sample = np.concatenate([sample, bounds])
    variance = float(sample.var(ddof=1)) if len(sample) > 1 else 0.0
    return float(sample.mean()) if len(sample) else 0.0, variance, len(sample)


def _interval(
    estimate: float, centre: float, error: float, num: int, freedom: float, confidence: Confidence
) -> Interval:
    margin = confidence.margin(error, num, freedom) if num and freedom >= 1 else math.inf
    return Interval(estimate, centre - margin, centre + margin, error, num)


def power_tuned(
    ratings: npt.NDArray[np.float64], predicted: npt.NDArray[np.float64], num_unrated: float = math.inf
) -> float:
    """Return the λ of least variance, between 0 and 1: cov(y, f) / (var(f) · (1 + rated / unrated)), 2311.01453."""
    if len(ratings) < 2 or not num_unrated or not (variance := float(predicted.var(ddof=1))):
        return 0.0
    covariance = float(np.cov(ratings, predicted)[0, 1])
    return min(1.0, max(0.0, covariance / (variance * (1 + len(ratings) / num_unrated))))


def _shifted(bounds: Bounds | None, weight: float) -> Bounds | None:
    return None if bounds is None else (bounds[0] - weight * bounds[1], bounds[1] - weight * bounds[0])


def _boundary(is_beyond: Callable[[float], bool], low: float, high: float) -> float:
    """Return where a condition that is false at `low` and true at `high` turns true."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return (low + high) / 2


def _at_least(hits: int, num: int, p: float) -> float:
    """Return P(X ≥ hits) for X ~ Binomial(num, p)."""
    if hits <= 0:
        return 1.0
    if p <= 0 or p >= 1:
        return float(p >= 1)
    log_p, log_q = math.log(p), math.log1p(-p)
    return min(
        1.0, math.fsum(math.exp(_log_choose(num, k) + k * log_p + (num - k) * log_q) for k in range(hits, num + 1))
    )


def _log_choose(num: int, k: int) -> float:
    return math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
