"""An engine's logprobs against a version's probe."""

from __future__ import annotations

import math

import pytest

from proxy.reload.loader import Gap, gap_to, limit_of, mismatch
from turnwise.version_directory import Probe

LOGPROBS = [-1.0, -2.0, -3.0, -4.0]


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
    assert found is not None
    assert found.startswith(
        "the engine's logprobs are 0.5 nats from the checkpoint's own probe on average and 1 at most, which at version "
        "0 was 3e-06 and 3e-05; the limits for float32 on an engine in float32 are 5e-05 and 0.0005 "
        "(--probe-tolerance). "
    )
    assert "an output head that is tied to the embeddings" in found
