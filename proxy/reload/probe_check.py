"""Whether an engine's logprobs match those of a version's probe, by the precision of both.

Two computations in float32 agree within 1e-4 nats, so a part of the model that kept old weights shows after a step or
two. In bfloat16 single rare tokens may be far off although the weights are right, so a small mean and a wide maximum
decide.
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


FLOAT32 = "float32"
BOTH_FLOAT32 = Limit(mean=5e-4, largest=5e-3)
"""Where trainer and engine compute in float32: over ten times what they differ by."""
COARSE_ENGINE = Limit(mean=0.05, largest=0.25)
"""Where the probe is in float32, and the engine is not or does not say."""
COARSE_PROBE = Limit(mean=0.1, largest=1.0)


def limit_of(probe: Probe, engine_dtype: str | None) -> Limit:
    """Return how far an engine that computes in this number format may be from a probe."""
    if probe.dtype != FLOAT32:
        return COARSE_PROBE
    return BOTH_FLOAT32 if engine_dtype == FLOAT32 else COARSE_ENGINE


def mismatch(
    probe: Probe,
    positions: Sequence[int],
    logprobs: Sequence[float],
    *,
    engine_dtype: str | None = None,
    tolerance: float | None = None,
) -> str | None:
    """Return in what an engine differs from a probe; None if it is within the limits.

    Args:
        probe: The text with the trainer's logprobs.
        positions: Positions in the text, at least 1. [N]
        logprobs: The engine's, at these positions. [N]
        engine_dtype: Number format of the engine's weights; None if it is not known.
        tolerance: The largest difference, in place of the limits by precision.
    """
    gaps = [abs(logprob - probe.logprobs[at - 1]) for logprob, at in zip(logprobs, positions, strict=True)]
    mean, largest = sum(gaps) / len(gaps), max(gaps)
    limit = limit_of(probe, engine_dtype) if tolerance is None else Limit(tolerance, tolerance)
    # A NaN fails every comparison, so it never counts as within the limits.
    if mean <= limit.mean and largest <= limit.largest:
        return None
    return (
        f"the engine's logprobs are {mean:.3g} nats from the checkpoint's own probe on average and {largest:.3g} at "
        f"most; the limits for {probe.dtype} on an engine in {engine_dtype or 'an unknown format'} are "
        f"{limit.mean:g} and {limit.largest:g} (--probe-tolerance). The engine does not compute what was "
        "published: most often a part of the model kept its old weights, such as an output head that is tied to the "
        "embeddings; on a CPU, start vLLM with Turnwise's plug-in"
    )
