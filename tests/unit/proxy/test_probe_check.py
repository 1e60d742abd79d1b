"""An engine's logprobs against a version's probe."""

from __future__ import annotations

import math

import pytest

from proxy.reload.probe_check import mismatch
from turnwise.version_directory import Probe

LOGPROBS = [-1.0, -2.0, -3.0, -4.0]


@pytest.mark.parametrize(
    ("dtype", "shifts", "tolerance", "is_match"),
    [
        ("float32", [0.04, 0.04, 0.04, 0.04], None, True),
        ("float32", [0.06, 0.06, 0.06, 0.06], None, False),  # mean 0.06 over 0.05
        ("float32", [0.0, 0.0, 0.0, 0.26], None, False),  # mean 0.065, largest over 0.25
        ("bfloat16", [0.0, 0.0, 0.0, 0.38], None, True),  # mean 0.095: one rare token is far off
        ("bfloat16", [0.11, 0.11, 0.11, 0.11], None, False),  # mean 0.11 over 0.1
        ("bfloat16", [0.0, 0.0, 0.0, 0.38], 0.3, False),
        ("float32", [0.0, 0.0, 0.0, 0.38], 0.4, True),
        ("bfloat16", [math.nan, 0.0, 0.0, 0.0], None, False),
        ("bfloat16", [0.0, math.nan, 0.0, 0.0], 5.0, False),
    ],
)
def test_mean_and_largest_difference_have_limits_by_precision(dtype, shifts, tolerance, is_match):
    probe = Probe([5, 6, 7, 8, 9], LOGPROBS, dtype)
    sampled = [logprob + shift for logprob, shift in zip(LOGPROBS, shifts, strict=True)]
    assert (mismatch(probe, [1, 2, 3, 4], sampled, tolerance) is None) == is_match


def test_a_mismatch_names_both_numbers_and_both_limits():
    found = mismatch(Probe([5, 6, 7], [-1.0, -2.0]), [1, 2], [-1.0, -3.0])
    assert found == (
        "the engine's logprobs are 0.5 nats from the checkpoint's own probe on average and 1 at most; the limits for "
        "float32 are 0.05 and 0.25 (--probe-tolerance)"
    )
