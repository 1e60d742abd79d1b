"""The verdict over a trial: whether its version does worse than the served one, by rewards and broken turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from proxy.settings import ProxySettings
from turnwise.store.arms import Arm, difference

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
    rise = canary.broken_share - control.broken_share
    variances = (each.broken_share * (1 - each.broken_share) / max(1, each.num_turns) for each in (canary, control))
    spread = math.sqrt(sum(variances))
    if rise - NUM_STANDARD_ERRORS * spread > settings.canary_broken_rise:
        return Verdict(
            False, f"{rise:.1%} more of its turns are broken; the limit is {settings.canary_broken_rise:.1%}"
        )
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


def drift(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the mean KL divergence of the new policy from the old over a text, nats a token, never negative.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, for a text that the old policy sampled:
    r − 1 − log r with r = p_after / p_before.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return statistics.fmean(math.expm1(each) - each for each in differences) if differences else 0.0
