"""The verdict over a trial: whether its version does worse than the served one, by rewards and broken turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from proxy.settings import ProxySettings
from turnwise.store.arms import Arm

NUM_STANDARD_ERRORS = 2.0
"""Confidence of a verdict: about 2.5 % of normal draws lie beyond."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial."""

    is_good: bool
    reason: str


def judge(canary: Arm, control: Arm, settings: ProxySettings) -> Verdict | None:
    """Compare the arms; None means that more sessions are needed.

    The canary is rolled back if its share of broken turns, or its mean reward, is worse than the control's by more than
    the limit plus `NUM_STANDARD_ERRORS` standard errors of the difference (Welch's, no equal variances assumed). It is
    promoted if it is not worse than the limit with the same confidence. After `canary_max_sessions` the mean alone
    decides, and without rewards the share of broken turns.
    """
    enough = settings.canary_min_sessions
    if min(canary.num_sessions, control.num_sessions) < enough:
        return None
    rise = _share(canary.num_broken, canary.num_turns) - _share(control.num_broken, control.num_turns)
    spread = math.hypot(*(_share_error(arm.num_broken, arm.num_turns) for arm in (canary, control)))
    if rise - NUM_STANDARD_ERRORS * spread > settings.canary_broken_rise:
        return Verdict(
            False, f"{rise:.1%} more of its turns are broken; the limit is {settings.canary_broken_rise:.1%}"
        )
    is_final = canary.num_sessions >= settings.canary_max_sessions
    if min(len(canary.rewards), len(control.rewards)) < enough:
        return Verdict(True, f"{rise:+.1%} broken turns, and too few rewards to compare") if is_final else None
    difference, error = _difference(canary.rewards, control.rewards)
    margin = 0.0 if is_final else NUM_STANDARD_ERRORS * error
    measured = (
        f"mean session reward {difference:+.3f} ± {error:.3f} over {len(canary.rewards)} sessions against "
        f"{len(control.rewards)}; the limit is {-settings.canary_reward_drop:+.3f}"
    )
    if difference + margin < -settings.canary_reward_drop:
        return Verdict(False, measured)
    if difference - margin >= -settings.canary_reward_drop:
        return Verdict(True, measured)
    return None


def _difference(canary: Sequence[float], control: Sequence[float]) -> tuple[float, float]:
    """Return the difference of the means and its standard error after Welch."""
    errors = [statistics.stdev(rewards) / math.sqrt(len(rewards)) for rewards in (canary, control)]
    return statistics.fmean(canary) - statistics.fmean(control), math.hypot(*errors)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _share_error(part: int, whole: int) -> float:
    share = _share(part, whole)
    return math.sqrt(share * (1 - share) / whole) if whole else 0.0


def drift(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the mean KL divergence of the new policy from the old over a text, nats a token, never negative.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, for a text that the old policy sampled:
    r − 1 − log r with r = p_after / p_before.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return statistics.fmean(math.expm1(each) - each for each in differences) if differences else 0.0
