"""Whether an engine's logprobs match those of a version's probe, by the precision of both.

What this engine and this trainer differ by is measured on version 0, which the engine starts with. Two computations in
float32 agree within 1e-4 nats, so a part of the model that kept old weights shows after a step or two. In bfloat16
single rare tokens may be far off although the weights are right, so a small mean and a wide maximum decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from turnwise.version_directory import Probe


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine's logprobs are from a probe, or may be, nats."""

    mean: float
    largest: float

    def is_within(self, limit: Gap) -> bool:
        return self.mean <= limit.mean and self.largest <= limit.largest


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The limits for one pair of precisions."""

    least: Gap
    """However near engine and trainer were at version 0: another text may differ more."""
    unmeasured: Gap
    """Where version 0 was not compared."""
    most: Gap
    """However far they were apart."""


FLOAT32 = "float32"
FACTOR = 5.0
"""How many times the difference at version 0 is within the limits."""
COARSE_ENGINE = Limits(Gap(0.05, 0.25), Gap(0.05, 0.25), Gap(0.1, 1.0))
"""Where the probe is in float32, and the engine is not or does not say."""
COARSE_PROBE = Limits(Gap(0.1, 1.0), Gap(0.1, 1.0), Gap(0.2, 2.0))
BOTH_FLOAT32 = Limits(Gap(5e-5, 5e-4), Gap(5e-4, 5e-3), COARSE_ENGINE.least)
"""Where trainer and engine compute in float32: they differ by 3e-6 on average, and by 5e-5 at most."""


def gap_to(probe: Probe, logprobs: Mapping[int, float]) -> Gap:
    gaps = [abs(logprob - probe.logprobs[at - 1]) for at, logprob in logprobs.items()]
    return Gap(sum(gaps) / len(gaps), max(gaps))


def limit_of(probe: Probe, engine_dtype: str | None, at_base: Gap | None) -> Gap:
    """Return how far an engine may be from a probe.

    Args:
        probe: Of the version.
        engine_dtype: Number format of the engine's weights; None if it is not known.
        at_base: How far it was from the probe of version 0; None if that was not compared.
    """
    limits = COARSE_PROBE
    if probe.dtype == FLOAT32:
        limits = BOTH_FLOAT32 if engine_dtype == FLOAT32 else COARSE_ENGINE
    if at_base is None:
        return limits.unmeasured
    return Gap(
        min(max(FACTOR * at_base.mean, limits.least.mean), limits.most.mean),
        min(max(FACTOR * at_base.largest, limits.least.largest), limits.most.largest),
    )


def mismatch(
    probe: Probe,
    found: Gap,
    *,
    engine_dtype: str | None,
    at_base: Gap | None,
    tolerance: float | None,
) -> str | None:
    """Return in what an engine differs from a probe; None if it is within the limits.

    Args:
        probe: Of the version.
        found: How far the engine is from it.
        engine_dtype: Number format of the engine's weights; None if it is not known.
        at_base: How far the engine was from the probe of version 0; None if that was not compared.
        tolerance: The largest difference, in place of the limits by precision.
    """
    limit = limit_of(probe, engine_dtype, at_base) if tolerance is None else Gap(tolerance, tolerance)
    if found.is_within(limit):
        return None
    before = "" if at_base is None else f", which at version 0 was {at_base.mean:.3g} and {at_base.largest:.3g}"
    return (
        f"the engine's logprobs are {found.mean:.3g} nats from the checkpoint's own probe on average and "
        f"{found.largest:.3g} at most{before}; the limits for {probe.dtype} on an engine in "
        f"{engine_dtype or 'an unknown format'} are {limit.mean:g} and {limit.largest:g} (--probe-tolerance). The "
        "engine does not compute what was published: most often a part of the model kept its old weights, such as an "
        "output head that is tied to the embeddings; on a CPU, start vLLM with Turnwise's plug-in. `turnwise verify "
        "--forward` names the part"
    )
