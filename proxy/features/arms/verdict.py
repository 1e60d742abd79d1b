"""The statistics of two arms: when a trial's rewards or broken turns are worse, and the lift of a version."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from proxy.features.arms.settings import ArmSettings
from turnwise.features import arms
from turnwise.features.statistics import intervals
from turnwise.features.statistics.confidence import MIN_NUM, AnyTime
from turnwise.types import Json

BROKEN_RISE = 0.1
"""How far a canary's share of broken turns may lie above the control's: failed, untrainable, or cut by length."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a trial."""

    is_good: bool
    reason: str


def judge(canary: arms.Arm, control: arms.Arm, settings: ArmSettings) -> Verdict | None:
    """Compare the arms; None means that more sessions are needed.

    The arms are looked at after every session, so each limit is held against an interval that is right at all of these
    looks. The canary is rolled back if its share of broken turns, or its mean reward, is certainly worse than the
    control's by more than the limit, and promoted if it is certainly not. After `canary_max_sessions` the mean alone
    decides, and without rewards the share of broken turns.
    """
    enough = settings.canary_min_sessions
    if min(canary.num_sessions, control.num_sessions) < enough:
        return None
    looks = AnyTime(narrowest_at=settings.canary_max_sessions)
    rise = canary.broken_share - control.broken_share
    if rise - _broken_margin(canary, control, looks) > BROKEN_RISE:
        return Verdict(False, f"{rise:.1%} more of its turns are broken; the limit is {BROKEN_RISE:.1%}")
    is_final = canary.num_sessions >= settings.canary_max_sessions
    if min(len(canary.rewards), len(control.rewards)) < enough:
        return Verdict(True, f"{rise:+.1%} broken turns, and too few rewards to compare") if is_final else None
    gain = intervals.difference(canary.rewards, control.rewards, looks)
    limit = -settings.canary_reward_drop
    measured = (
        f"mean session reward {gain.mean:+.3f} ± {gain.error:.3f} over {len(canary.rewards)} sessions against "
        f"{len(control.rewards)}; the limit is {limit:+.3f}"
    )
    if gain.high < limit or (is_final and gain.mean < limit):
        return Verdict(False, measured)
    return Verdict(True, measured) if is_final or gain.low >= limit else None


def _broken_margin(canary: arms.Arm, control: arms.Arm, looks: AnyTime) -> float:
    variances = (each.broken_share * (1 - each.broken_share) / max(1, each.num_turns) for each in (canary, control))
    num = canary.num_turns + control.num_turns
    return looks.margin(math.sqrt(sum(variances)), max(1, num), num)


def lift(newer: arms.Arm, older: arms.Arm) -> Json:
    """Return the differences of the mean rewards, whole (`reward`) and by name, with intervals for repeated looks.

    Each has `mean`, `low` and `high`; rewards that either arm has fewer than `MIN_NUM` of are left out.
    """
    pairs = {name: (values, older.by_name.get(name, ())) for name, values in newer.by_name.items()}
    pairs["reward"] = (newer.rewards, older.rewards)
    return {name: _interval(*each) for name, each in pairs.items() if min(map(len, each)) >= MIN_NUM}


def _interval(newer: Sequence[float], older: Sequence[float]) -> Json:
    found = intervals.difference(newer, older, AnyTime())
    return {"mean": found.mean, "low": found.low, "high": found.high}


def drift(before: Iterable[float], after: Iterable[float]) -> float:
    """Return the mean KL divergence of the new policy from the old over a text, nats a token, never negative.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, for a text that the old policy sampled:
    r − 1 − log r with r = p_after / p_before.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return statistics.fmean(math.expm1(each) - each for each in differences) if differences else 0.0
