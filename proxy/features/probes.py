"""Whether an engine computes what the trainer published: its logprobs of a text, the version's probe, are compared.

An adapter that somebody brought has no probe, and must change the model's logprobs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.engines.engine import Engine, Lane
from proxy.reload.checkpoint import moves_model
from proxy.reload.loader import Loader
from proxy.reload.version_files import PATIENCE_SECONDS
from turnwise.errors import ReloadFailed
from turnwise.features.verify.known_tokens import logprobs_request, read_logprobs
from turnwise.types import Json, PolicyVersion
from turnwise.version_directory import ENGINE_ANSWER, Probe, read_probe

log = logging.getLogger(__name__)

NUM_PROBED = 16
PROBED_TEXT = [{"role": "user", "content": "Name a river, a hill, two colours and the numbers from one to eight. " * 2}]
"""What is computed with and without an adapter that somebody brought: it has no probe of a trainer's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine's logprobs are from a probe, or may be, nats."""

    mean: float
    largest: float

    def is_within(self, limit: Gap) -> bool:
        return self.mean <= limit.mean and self.largest <= limit.largest


@dataclasses.dataclass(frozen=True, slots=True)
class GapLimits:
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
COARSE_ENGINE = GapLimits(Gap(0.05, 0.25), Gap(0.05, 0.25), Gap(0.1, 1.0))
"""Where the probe is in float32, and the engine is not or does not say."""
COARSE_PROBE = GapLimits(Gap(0.1, 1.0), Gap(0.1, 1.0), Gap(0.2, 2.0))
BOTH_FLOAT32 = GapLimits(Gap(5e-5, 5e-4), Gap(5e-4, 5e-3), COARSE_ENGINE.least)
"""Where trainer and engine compute in float32: they differ by 3e-6 on average, and by 5e-5 at most."""


def gap_to(probe: Probe, logprobs: Mapping[int, float]) -> Gap:
    gaps = [abs(logprob - probe.logprobs[at - 1]) for at, logprob in logprobs.items()]
    return Gap(sum(gaps) / len(gaps), max(gaps))


def limit_of(probe: Probe, engine_dtype: str | None, at_base: Gap | None) -> Gap:
    """Return how far an engine with weights of this number format may be from a probe.

    `at_base` is how far it was from the probe of version 0; None if that was not compared.
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

    `found` is how far the engine is from it, and `tolerance` the largest difference, in place of the limits by
    precision; the others are as in `limit_of`.
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


class ProbedLoader(Loader):
    """Brings engines to versions, and lets calls sample with one after its probe agrees."""

    def __init__(self, *of_loader: Any) -> None:
        """Bring engines to versions as `Loader` does."""
        super().__init__(*of_loader)
        self._at_base: dict[str, Gap] = {}
        """How far each engine was from the trainer at version 0, by URL."""

    async def probe(
        self,
        version: PolicyVersion,
        engine: Engine,  # noqa: ARG002  for subclasses
        *,
        seconds: float | None = PATIENCE_SECONDS,
    ) -> Probe | None:
        """Return a version's text with its logprobs; None without one."""
        path = version.path
        read = functools.partial(read_probe, Path(path))
        return await self.files.read(("probe", path), path, read, seconds=seconds)

    async def verify(self, lane: Lane, version: PolicyVersion, probe: Probe | None) -> None:
        if probe is None:
            if lane.adapter is not None:
                await self._check_moved(lane, version)
            return
        found = await probed(lane, probe)
        problem = mismatch(
            probe,
            gap_to(probe, found),
            engine_dtype=lane.engine.dtype,
            at_base=self._at_base.get(lane.engine.url),
            tolerance=self._settings.probe_tolerance,
        )
        if problem is not None:
            evidence = {ENGINE_ANSWER: {"positions": list(found), "logprobs": list(found.values())}}
            raise ReloadFailed(problem, evidence=evidence)

    async def _check_moved(self, lane: Lane, version: PolicyVersion) -> None:
        """Compare an adapter without a probe with the model under it: an engine that skips its tensors serves that."""
        path, engine = version.path, lane.engine
        seconds = self._settings.reload_timeout_seconds
        if not await self.files.read(("moves", path), path, functools.partial(moves_model, path), seconds=seconds):
            return
        text = Probe(await engine.tokenise({"model": engine.model, "messages": PROBED_TEXT}), [])
        if await probed(lane, text) == await probed(engine.base_lane, text):
            raise ReloadFailed(
                f"the engine at {engine.url} gives the same logprobs with the adapter {path!r} of version "
                f"{version.version} as without: it does not apply it. Compare the names of its tensors with those of "
                "the served model, and the engine's log on debug level"
            )

    async def compare_base(self, engine: Engine, probe: Probe | None) -> None:
        """Measure once what an engine and the trainer differ by at version 0, while the engine has its own model."""
        base = None if probe is None else probe.base
        if base is None or engine.url in self._at_base or not engine.has_own_model:
            return
        found = self._at_base[engine.url] = gap_to(base, await probed(engine.base_lane, base))
        log.info(
            "the engine at %s and the trainer differ by %.3g nats on average and %.3g at most at version 0",
            engine.url,
            found.mean,
            found.largest,
        )


async def probed(lane: Lane, probe: Probe) -> dict[int, float]:
    """Return what an engine computes of some of a probe's tokens, by their positions."""
    positions = probe.positions(NUM_PROBED)
    logprobs = await token_logprobs(lane.engine, lane.model, probe.token_ids, positions)
    return dict(zip(positions, logprobs, strict=True))


async def token_logprobs(
    engine: Engine, model: str, token_ids: list[int], positions: list[int], parameters: Json | None = None
) -> list[float]:
    """Return the logprobs of some of a text's tokens, each given the tokens before it, under a served model.

    Raises:
        EngineRefused: the engine does not support that.
        EngineUnavailable: no answer.
    """
    body = logprobs_request(model, token_ids, positions, parameters or {})
    reply = await engine.ask("POST", "/v1/completions", body, seconds=60.0)
    return read_logprobs(reply, token_ids, positions)
