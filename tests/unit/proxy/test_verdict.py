"""How a version on trial is judged; all numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from proxy.reload.verdict import drift, judge
from proxy.settings import ProxySettings
from turnwise.store.arms import Arm

SETTINGS = ProxySettings(canary_share=0.2, canary_min_sessions=4, canary_max_sessions=100, canary_reward_drop=0.1)


def arm(rewards: list[float], *, num_turns: int = 100, num_broken: int = 0) -> Arm:
    return Arm(tuple(rewards), len(rewards), num_turns, num_broken)


def test_nothing_is_judged_before_both_arms_have_enough_sessions():
    assert judge(arm([0.0] * 3), arm([1.0] * 50), SETTINGS) is None
    assert judge(arm([0.0] * 50), arm([1.0] * 3), SETTINGS) is None


def test_a_significant_fall_of_the_reward_beyond_the_limit_rolls_back():
    """0.5 against 1.0; errors √(1/3)/√4 = 0.289 and 0: −0.5 + 2 × 0.289 = +0.08 is not sure; with 16 it is −0.24."""
    assert judge(arm([0.0, 0.0, 1.0, 1.0]), arm([1.0] * 4), SETTINGS) is None
    verdict = judge(arm([0.0, 1.0] * 8), arm([1.0] * 16), SETTINGS)
    assert verdict is not None
    assert not verdict.is_good
    assert "-0.500 ± 0.129" in verdict.reason


def test_a_reward_that_significantly_stays_within_the_limit_promotes():
    """0.95 against 1.0 without spread: −0.05 is above −0.1."""
    verdict = judge(arm([0.95] * 4), arm([1.0] * 4), SETTINGS)
    assert verdict is not None
    assert verdict.is_good


def test_after_the_maximum_of_sessions_the_mean_alone_decides():
    """100 of 0/1 at 0.88 against 1.0: error √(0.1067/100) = 0.0327; −0.12 + 0.065 is not sure, but −0.12 < −0.1."""
    nearly = [0.0] * 12 + [1.0] * 88
    assert judge(arm(nearly[:99]), arm([1.0] * 200), SETTINGS) is None
    verdict = judge(arm(nearly), arm([1.0] * 200), SETTINGS)
    assert verdict is not None
    assert not verdict.is_good


def test_broken_turns_roll_back_without_waiting_for_rewards():
    """30 of 100 against 5 of 100: +0.25, error √(0.0021 + 0.000475) = 0.0507; 0.25 − 0.10 = 0.149 is over 0.1."""
    verdict = judge(Arm((), 4, 100, 30), Arm((), 4, 100, 5), SETTINGS)
    assert verdict is not None
    assert not verdict.is_good
    assert "25.0% more of its turns are broken" in verdict.reason
    assert judge(Arm((), 4, 100, 24), Arm((), 4, 100, 5), SETTINGS) is None


def test_without_rewards_a_trial_without_more_broken_turns_promotes_after_the_maximum_of_sessions():
    assert judge(Arm((), 99, 0, 0), Arm((), 400, 400, 0), SETTINGS) is None
    verdict = judge(Arm((), 100, 100, 0), Arm((), 400, 400, 0), SETTINGS)
    assert verdict is not None
    assert verdict.is_good


def test_drift_is_zero_for_the_same_policy_and_grows_with_the_difference():
    """k3 by hand: r = e^0.5: 1.6487 − 1 − 0.5 = 0.1487; r = e^−0.5: 0.6065 − 1 + 0.5 = 0.1065; mean 0.1276."""
    assert drift([-1.0, -2.0], [-1.0, -2.0]) == 0.0
    assert drift([-1.0, -2.0], [-0.5, -2.5]) == pytest.approx((0.148721 + 0.106531) / 2, abs=1e-6)
    assert drift([], []) == 0.0
    assert math.isnan(drift([-1.0], [math.nan]))
