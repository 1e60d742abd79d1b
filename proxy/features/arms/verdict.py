"""The statistics of two arms: when a trial's rewards or broken turns are worse, and the lift of a version."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from proxy.features.arms.settings import ArmSettings
from turnwise.features import arms
from turnwise.types import Json

NUM_STANDARD_ERRORS = 2.0
"""Confidence of a verdict: about 2.5 % of normal draws lie beyond."""
BROKEN_RISE = 0.1
"""How far a canary's share of broken turns may lie above the control's: failed, untrainable, or cut by length."""
ALPHA = 0.05
NARROWEST_AT = 500
MIN_REWARDS = 8
"""Rewards that an arm needs for an interval; the standard error of fewer is no measure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial."""

    is_good: bool
    reason: str


def judge(canary: arms.Arm, control: arms.Arm, settings: ArmSettings) -> Verdict | None:
    """Compare the arms; None means that more sessions are needed.

    The canary is rolled back if its share of broken turns, or its mean reward, is worse than the control's by more than
    the limit plus `NUM_STANDARD_ERRORS` standard errors of the difference (Welch's, no equal variances assumed). It is
    promoted if it is not worse than the limit with the same confidence. After `canary_max_sessions` the mean alone
    decides, and without rewards the share of broken turns.
    """
    enough = settings.canary_min_sessions
    if min(canary.num_sessions, control.num_sessions) < enough:
        return None
    rise = canary.broken_share - control.broken_share
    variances = (each.broken_share * (1 - each.broken_share) / max(1, each.num_turns) for each in (canary, control))
    spread = math.sqrt(sum(variances))
    if rise - NUM_STANDARD_ERRORS * spread > BROKEN_RISE:
        return Verdict(False, f"{rise:.1%} more of its turns are broken; the limit is {BROKEN_RISE:.1%}")
    is_final = canary.num_sessions >= settings.canary_max_sessions
    if min(len(canary.rewards), len(control.rewards)) < enough:
        return Verdict(True, f"{rise:+.1%} broken turns, and too few rewards to compare") if is_final else None
    gain, error = difference(canary.rewards, control.rewards)
    margin = 0.0 if is_final else NUM_STANDARD_ERRORS * error
    measured = (
        f"mean session reward {gain:+.3f} ± {error:.3f} over {len(canary.rewards)} sessions against "
        f"{len(control.rewards)}; the limit is {-settings.canary_reward_drop:+.3f}"
    )
    if gain + margin < -settings.canary_reward_drop:
        return Verdict(False, measured)
    if gain - margin >= -settings.canary_reward_drop:
        return Verdict(True, measured)
    return None


def lift(newer: arms.Arm, older: arms.Arm) -> Json:
    """Return the differences of the mean rewards, whole (`reward`) and by name, with intervals for repeated looks.

    Each has `mean`, `low` and `high`; rewards that either arm has fewer than `MIN_REWARDS` of are left out.
    """
    pairs = {name: (values, older.by_name.get(name, ())) for name, values in newer.by_name.items()}
    pairs["reward"] = (newer.rewards, older.rewards)
    return {name: _interval(*each) for name, each in pairs.items() if min(map(len, each)) >= MIN_REWARDS}


def _interval(newer: Sequence[float], older: Sequence[float]) -> Json:
    """Return the difference of two means with the interval that holds at all times with probability 1 − α.

    The asymptotic confidence sequence of Waudby-Smith et al. 2021 (arXiv:2103.06476), theorem 2.2, for the difference
    between two arms to which sessions are assigned at random. With n sessions and the standard error s of the
    difference it is s · √(2 (n ρ² + 1) / (n ρ²) · log(√(n ρ² + 1) / α)) on each side. ρ makes it narrowest at
    `NARROWEST_AT` sessions. So it may be looked at after every session, and the first time that it excludes 0 counts.
    """
    mean, error = difference(newer, older)
    rho_2 = (-2 * math.log(ALPHA) + math.log(-2 * math.log(ALPHA)) + 1) / NARROWEST_AT
    n_rho_2 = (len(newer) + len(older)) * rho_2
    margin = error * math.sqrt(2 * (n_rho_2 + 1) / n_rho_2 * math.log(math.sqrt(n_rho_2 + 1) / ALPHA))
    return {"mean": mean, "low": mean - margin, "high": mean + margin}


def difference(newer: Sequence[float], older: Sequence[float]) -> tuple[float, float]:
    error = math.hypot(*(statistics.stdev(rewards) / math.sqrt(len(rewards)) for rewards in (newer, older)))
    return statistics.fmean(newer) - statistics.fmean(older), error


def drift(before: Iterable[float], after: Iterable[float]) -> float:
    """Return the mean KL divergence of the new policy from the old over a text, nats a token, never negative.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, for a text that the old policy sampled:
    r − 1 − log r with r = p_after / p_before.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return statistics.fmean(math.expm1(each) - each for each in differences) if differences else 0.0
