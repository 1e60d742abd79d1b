"""Whether an engine's logprobs match those of a version's probe, by the precision of the numbers.

In bfloat16 single rare tokens may be far off although the weights are right, so a small mean and a wide maximum decide.
The limits of float32 leave room for an engine that computes in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from turnwise.version_directory import Probe


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """How far an engine's logprobs may be from a probe, nats."""

    mean: float
    largest: float


LIMITS = {"float32": Limit(mean=0.05, largest=0.25), "bfloat16": Limit(mean=0.1, largest=1.0)}
"""By precision of the probe."""


def mismatch(
    probe: Probe, positions: Sequence[int], logprobs: Sequence[float], tolerance: float | None = None
) -> str | None:
    """Return in what an engine differs from a probe; None if it is within the limits.

    Args:
        probe: The text with the trainer's logprobs.
        positions: Positions in the text, at least 1. [N]
        logprobs: The engine's, at these positions. [N]
        tolerance: The largest difference, in place of the limits of the probe's precision.
    """
    gaps = [abs(logprob - probe.logprobs[at - 1]) for logprob, at in zip(logprobs, positions, strict=True)]
    mean, largest = sum(gaps) / len(gaps), max(gaps)
    limit = LIMITS.get(probe.dtype, LIMITS["float32"]) if tolerance is None else Limit(tolerance, tolerance)
    # A NaN fails every comparison, so it never counts as within the limits.
    if mean <= limit.mean and largest <= limit.largest:
        return None
    return (
        f"the engine's logprobs are {mean:.3g} nats from the checkpoint's own probe on average and {largest:.3g} at "
        f"most; the limits for {probe.dtype} are {limit.mean:g} and {limit.largest:g} (--probe-tolerance)"
    )
