"""The judgements of a reload: the verdict over a trial, and whether an engine computes what was published."""

import math
import random
from types import SimpleNamespace

import pytest

from proxy.features.arms.counts import ArmCalls
from proxy.features.arms.settings import ArmSettings
from proxy.features.arms.verdict import drift, judge
from proxy.features.probes import Gap, gap_to, limit_of, mismatch
from proxy.metrics import Metrics
from turnwise.features.arms import Arm
from turnwise.types import PolicyStatus, PolicyVersion, Session
from turnwise.version_directory import Probe

SETTINGS = ArmSettings(canary_share=0.2, canary_min_sessions=4, canary_max_sessions=100, canary_reward_drop=0.1)
LOGPROBS = [-1.0, -2.0, -3.0, -4.0]


def arm(rewards: list[float], *, num_turns: int = 100, num_broken: int = 0) -> Arm:
    return Arm(tuple(rewards), len(rewards), num_turns, num_broken)


def test_nothing_is_judged_before_both_arms_have_enough_sessions():
    assert judge(arm([0.0] * 3), arm([1.0] * 50), SETTINGS) is None
    assert judge(arm([0.0] * 50), arm([1.0] * 3), SETTINGS) is None


def test_a_significant_fall_of_the_reward_beyond_the_limit_rolls_back():
    """0.5 against 1.0 with the errors 0.289 and 0.0801 is not sure at 8 sessions and is at 80: 2.88 errors, −0.27."""
    assert judge(arm([0.0, 0.0, 1.0, 1.0]), arm([1.0] * 4), SETTINGS) is None
    verdict = judge(arm([0.0, 1.0] * 20), arm([1.0] * 40), SETTINGS)
    assert not verdict.is_good
    assert "-0.500 ± 0.080" in verdict.reason


def test_a_version_that_changes_nothing_is_hardly_ever_rolled_back_at_any_of_a_hundred_looks():
    """Two standard errors at each look are no interval of a hundred looks."""
    generator = random.Random(0)
    settings = ArmSettings(canary_share=0.5, canary_min_sessions=8, canary_max_sessions=100, canary_reward_drop=0.001)
    rolled_back = 0
    for _ in range(200):
        canary, control = ([float(generator.random() < 0.5) for _ in range(99)] for _ in range(2))
        looks = (judge(arm(canary[:num]), arm(control[:num]), settings) for num in range(8, 100))
        first = next((verdict for verdict in looks if verdict is not None), None)
        rolled_back += first is not None and not first.is_good
    assert rolled_back <= 10


def test_a_reward_that_significantly_stays_within_the_limit_promotes():
    """0.95 against 1.0 without spread: −0.05 is above −0.1."""
    assert judge(arm([0.95] * 4), arm([1.0] * 4), SETTINGS).is_good


def test_after_the_maximum_of_sessions_the_mean_alone_decides():
    """100 of 0/1 at 0.88 against 1.0: error √(0.1067/100) = 0.0327; −0.12 + 0.065 is not sure, but −0.12 < −0.1."""
    nearly = [0.0] * 12 + [1.0] * 88
    assert judge(arm(nearly[:99]), arm([1.0] * 200), SETTINGS) is None
    assert not judge(arm(nearly), arm([1.0] * 200), SETTINGS).is_good


def test_broken_turns_roll_back_without_waiting_for_rewards():
    """90 of 300 against 15 of 300: +0.25, error √(0.0007 + 0.000158) = 0.0293; 0.25 − 3.2 × 0.0293 is over 0.1."""
    verdict = judge(Arm((), 4, 300, 90), Arm((), 4, 300, 15), SETTINGS)
    assert not verdict.is_good
    assert "25.0% more of its turns are broken" in verdict.reason
    assert judge(Arm((), 4, 100, 24), Arm((), 4, 100, 5), SETTINGS) is None


def test_without_rewards_a_trial_without_more_broken_turns_promotes_after_the_maximum_of_sessions():
    assert judge(Arm((), 99, 0, 0), Arm((), 400, 400, 0), SETTINGS) is None
    assert judge(Arm((), 100, 100, 0), Arm((), 400, 400, 0), SETTINGS).is_good


def test_drift_is_zero_for_the_same_policy_and_grows_with_the_difference():
    """k3 by hand: r = e^0.5: 1.6487 − 1 − 0.5 = 0.1487; r = e^−0.5: 0.6065 − 1 + 0.5 = 0.1065; mean 0.1276."""
    assert drift([-1.0, -2.0], [-1.0, -2.0]) == 0.0
    assert drift([-1.0, -2.0], [-0.5, -2.5]) == pytest.approx((0.148721 + 0.106531) / 2, abs=1e-6)
    assert drift([], []) == 0.0
    assert math.isnan(drift([-1.0], [math.nan]))


@pytest.mark.parametrize(
    ("dtype", "engine_dtype", "shifts", "tolerance", "is_match"),
    [
        ("float32", "float32", [1e-4, 1e-4, 1e-4, 1e-4], None, True),  # what a right engine differs by
        ("float32", "float32", [6e-4, 6e-4, 6e-4, 6e-4], None, False),  # mean 6e-4 over 5e-4
        ("float32", "float32", [0.0, 0.0, 0.0, 6e-3], None, False),  # largest over 5e-3
        ("float32", "bfloat16", [0.04, 0.04, 0.04, 0.04], None, True),
        ("float32", None, [0.04, 0.04, 0.04, 0.04], None, True),
        ("float32", "bfloat16", [0.06, 0.06, 0.06, 0.06], None, False),  # mean 0.06 over 0.05
        ("float32", None, [0.0, 0.0, 0.0, 0.26], None, False),  # mean 0.065, largest over 0.25
        ("bfloat16", "float32", [0.0, 0.0, 0.0, 0.38], None, True),  # mean 0.095: one rare token is far off
        ("bfloat16", "bfloat16", [0.11, 0.11, 0.11, 0.11], None, False),  # mean 0.11 over 0.1
        ("bfloat16", "bfloat16", [0.0, 0.0, 0.0, 0.38], 0.3, False),
        ("float32", "float32", [0.0, 0.0, 0.0, 0.38], 0.4, True),
        ("bfloat16", "bfloat16", [math.nan, 0.0, 0.0, 0.0], None, False),
        ("bfloat16", "bfloat16", [0.0, math.nan, 0.0, 0.0], 5.0, False),
    ],
)
def test_mean_and_largest_difference_have_limits_by_both_precisions(dtype, engine_dtype, shifts, tolerance, is_match):
    probe = Probe([5, 6, 7, 8, 9], LOGPROBS, dtype)
    sampled = {at: logprob + shift for at, (logprob, shift) in enumerate(zip(LOGPROBS, shifts, strict=True), 1)}
    found = mismatch(probe, gap_to(probe, sampled), engine_dtype=engine_dtype, at_base=None, tolerance=tolerance)
    assert (found is None) == is_match


@pytest.mark.parametrize(
    ("dtype", "engine_dtype", "at_base", "limit"),
    [
        ("float32", "float32", Gap(3e-6, 3e-5), Gap(5e-5, 5e-4)),  # 5 times that is below what another text may need
        ("float32", "float32", Gap(4e-4, 2e-3), Gap(2e-3, 1e-2)),  # five times the difference at version 0
        ("float32", "float32", Gap(0.5, 2.0), Gap(0.05, 0.25)),  # so far apart is no precision of float32
        ("float32", "bfloat16", Gap(1e-3, 1e-2), Gap(0.05, 0.25)),
        ("bfloat16", "bfloat16", Gap(0.03, 0.3), Gap(0.15, 1.5)),
        ("float32", "float32", None, Gap(5e-4, 5e-3)),
    ],
)
def test_the_limits_follow_what_engine_and_trainer_differ_by_at_version_0(dtype, engine_dtype, at_base, limit):
    found = limit_of(Probe([5, 6], [-1.0], dtype), engine_dtype, at_base)
    assert (found.mean, found.largest) == pytest.approx((limit.mean, limit.largest))


def test_a_mismatch_names_both_numbers_both_limits_and_the_likely_cause():
    probe, at_base = Probe([5, 6, 7], [-1.0, -2.0]), Gap(3e-6, 3e-5)
    found = mismatch(probe, Gap(0.5, 1.0), engine_dtype="float32", at_base=at_base, tolerance=None)
    assert found.startswith(
        "the engine's logprobs are 0.5 nats from the checkpoint's own probe on average and 1 at most, which at version "
        "0 was 3e-06 and 3e-05; the limits for float32 on an engine in float32 are 5e-05 and 0.0005 "
        "(--probe-tolerance). "
    )
    assert "an output head that is tied to the embeddings" in found


def test_a_call_during_a_canary_is_counted_once_however_often_it_is_sent():
    beside = {PolicyStatus.CANARY: PolicyVersion(version=2, path="")}
    step = ArmCalls(SimpleNamespace(pool=SimpleNamespace(state=lambda _: SimpleNamespace(beside=beside))))
    step.calls = Metrics().counter(*ArmCalls.counters["calls"])
    place, lane = SimpleNamespace(session=Session(session_id="s")), SimpleNamespace(version=2)
    call = SimpleNamespace(policy_version=None)
    for is_sent_again in (False, True):
        step.sent(SimpleNamespace(place=place, call=call, lane=lane, is_sent_again=is_sent_again))
    (counted,) = (each for each in step.calls.collect()[0].samples if each.name.endswith("_total"))
    assert (counted.labels, counted.value) == ({"arm": "canary"}, 1)
