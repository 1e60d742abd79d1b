"""What a version would change, from sessions that another one sampled: importance weights, with their refusals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.features.statistics.confidence import Confidence
from turnwise.features.statistics.intervals import Bounds, Interval, Values

Reals: TypeAlias = npt.NDArray[np.float64]

MIN_SESSIONS = 100
MIN_EFFECTIVE = 40
"""Sessions that the weights must leave. Below it they fail upwards: the estimate is too high, and its interval too
narrow."""
NUM_STANDARD_ERRORS_OFF = 3.0
"""How far above 1 the mean weight may lie."""
NUM_STANDARD_ERRORS_SURPRISED = 3.3
"""How far from 0 the sum of surprises may lie: one of a thousand honest logs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """The change of the mean reward from the version that sampled to the one that is asked about."""

    interval: Interval | None
    """None where it was refused."""
    reason: str | None
    """Why nothing can be said."""
    num: int
    num_effective: float
    """(Σ w)² / Σ w²: sessions that carry the estimate."""
    mean_weight: float
    """Mean of π / μ. It is 1 within its error if each μ is the probability that sampled."""
    is_off: bool
    """Whether some propensity is certainly wrong. Not said of a version that is too far."""


@dataclasses.dataclass(frozen=True, slots=True)
class Surprise:
    """How much less probable the tokens of a session are than sampled ones must be: the sum, and its variance."""

    total: float
    variance: float
    """What the distributions say, so that rare tokens count that happen not to be in the log."""
    seen: float = 0.0
    """The variance as the log has it; by a hotter sampling it is larger, and no error is."""
    reweighted: float = 0.0
    """That of the sum. Beside `seen` it says how much the weights add to the variance."""


UNKNOWN = Surprise(0.0, 0.0)


def change(
    log_weights: Values,
    rewards: Values,
    confidence: Confidence,
    bounds: Bounds,
    *,
    clusters: Sequence[Hashable] | None = None,
    surprises: Sequence[Surprise] = (),
    least: int = MIN_SESSIONS,
) -> Change:
    """Estimate the change of the mean reward by self-normalised weights, paired on the same sessions.

    `log_weights`: log π(session) − log μ(session), one a session. Two ghosts of the largest weight, with the least and
    the greatest reward, widen the interval where one session could carry the estimate. With weights w of mean 1 and
    v = Σ w r / n, the standard error is that of ψ = w (r − v) − (r − mean r) (Owen 2013, "Monte Carlo theory", 9.2).
    What the mean of π / μ lacks to 1, beyond its standard error, was never logged: its rewards may be any within
    `bounds`. Sessions of one cluster, such as runs of one task, are not independent: their ψ are added up first. Fewer
    sessions than `least` are refused, and those whose `surprises` or whose weights show that the stored probabilities
    are not those that sampled.
    """
    logs, values = np.asarray(log_weights, np.float64), np.asarray(rewards, np.float64)
    num = len(logs)
    if not num:
        return Change(None, "no session is left to estimate from", 0, 0.0, math.nan, is_off=False)
    plain = np.exp(np.clip(logs, -700, 700))
    effective = float(np.exp(2 * _log_sum(logs) - _log_sum(2 * logs)))
    mean_weight = float(plain.mean())
    spread = float(plain.std(ddof=1)) / math.sqrt(num) if num > 1 else 0.0
    # The weights of a version that is too far are too skewed for a standard error of their mean.
    is_known = num >= max(least, 2) and effective >= MIN_EFFECTIVE
    # A part that was never logged surprises too, and is no wrong probability.
    is_unlogged = 1 - mean_weight > NUM_STANDARD_ERRORS_OFF * spread + 1e-6
    why_off = _why_off(mean_weight, spread, surprises, is_unlogged=is_unlogged) if is_known else None
    reason = why_off or _why_refused(num, effective, mean_weight, least, is_unlogged=is_unlogged)
    interval = None
    if reason is None:
        unlogged = max(0.0, 1 - mean_weight - spread)
        interval = _paired(logs, values, confidence, bounds, clusters, unlogged)
    return Change(interval, reason, num, effective, mean_weight, why_off is not None)


def surprise_of(logprobs: Values, behaviour: Values, entropies: Values, variances: Values) -> Surprise:
    """Return the surprise of a session's tokens, the sum of π/μ (−log π − H(π)).

    `logprobs` are of the version π that is asked about, at the recorded sampling, `entropies` and `variances` the means
    of −log π and its variances by π, and `behaviour` is the stored log μ; one of each a token. By every μ that sampled,
    the mean of each token's summand is Σ_a π(a) (−log π(a) − H) = 0, whatever came before and whatever π is, so their
    variances add up. The summand is the score of a temperature at 1: nothing tells a wrong one better (Neyman and
    Pearson).
    """
    logs, entropy = np.asarray(logprobs, np.float64), np.asarray(entropies, np.float64)
    weights = np.exp(np.minimum(logs - np.asarray(behaviour, np.float64), 300))
    off = -logs - entropy
    return Surprise(
        total=float((weights * off).sum()),
        variance=float(np.sum(variances, dtype=np.float64)),
        seen=float((weights * off**2).sum()),
        reweighted=float((weights**2 * off**2).sum()),
    )


def why_too_few(num: int, least: int) -> str:
    return f"{num} sessions can be compared, and {least} are needed"


def _paired(
    logs: Reals,
    rewards: Reals,
    confidence: Confidence,
    bounds: Bounds,
    clusters: Sequence[Hashable] | None,
    unlogged: float,
) -> Interval:
    """`unlogged`: the share of what is done now of which nothing is known, so that its rewards may be any."""
    estimate = _influence(logs, rewards)[0]
    ghosts = np.full(2, logs.max())
    _, parts = _influence(np.concatenate([logs, ghosts]), np.concatenate([rewards, bounds]))
    num = len(logs)
    if clusters is not None:
        numbers: dict[Hashable, int] = {}
        of = [numbers.setdefault(each, len(numbers)) for each in clusters]
        parts = np.bincount([*of, len(numbers), len(numbers) + 1], weights=parts).astype(np.float64)
    error = float(np.sqrt(np.square(parts).sum())) / (num + len(ghosts))
    margin = confidence.margin(error, num, len(parts) - len(ghosts) - 1)
    low, high = (margin + unlogged * abs(estimate + rewards.mean() - bound) for bound in bounds)
    return Interval(estimate, float(estimate - low), float(estimate + high), error, num)


def _influence(logs: Reals, rewards: Reals) -> tuple[float, Reals]:
    weights = np.exp(logs - _log_sum(logs)) * len(logs)
    new, old = float((weights * rewards).mean()), float(rewards.mean())
    return new - old, weights * (rewards - new) - (rewards - old)


def _log_sum(logs: Reals) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


def _why_off(mean_weight: float, spread: float, surprises: Sequence[Surprise], *, is_unlogged: bool) -> str | None:
    wrong = "the stored probabilities are not those that sampled"
    total, error = _surprise(surprises)
    if abs(total) > NUM_STANDARD_ERRORS_SURPRISED * error and not (is_unlogged and total < 0):
        is_less, higher = ("less", "higher") if total > 0 else ("more", "lower")
        return (
            f"the sampled tokens are {is_less} probable than at the recorded temperature ({abs(total) / error:.1f} "
            f"standard errors): {wrong}, as if a {higher} temperature did, or another sampling"
        )
    if mean_weight - 1 > NUM_STANDARD_ERRORS_OFF * spread + 1e-6:
        return f"the mean weight is {mean_weight:.3g} and must be 1: {wrong}"
    return None


def _surprise(surprises: Sequence[Surprise]) -> tuple[float, float]:
    """Return the sum, and its standard error by the distributions, larger by what the weights add."""
    total, variance, seen, reweighted = (
        np.array([dataclasses.astuple(each) for each in surprises]).reshape(-1, 4).sum(0)
    )
    return float(total), math.sqrt(variance * max(1.0, reweighted / seen if seen else 1.0))


def _why_refused(num: int, effective: float, mean_weight: float, least: int, *, is_unlogged: bool) -> str | None:
    if num < least:
        return why_too_few(num, least)
    if effective < MIN_EFFECTIVE:
        return (
            f"only {effective / num:.1%} of what this version would do was ever logged ({effective:.0f} of {num} "
            "sessions): it has moved too far to tell; try it on some sessions (canary)"
        )
    if is_unlogged:
        return (
            f"the mean weight of {num} sessions is {mean_weight:.3g}: a part of what this version does was never "
            "logged; try it on some sessions (canary)"
        )
    return None
