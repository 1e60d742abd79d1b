"""One engine, one version: load it, check it, and put the last good one back when it is not taken.

The engine is paused in keep mode, so running calls go on under the new weights, and its gate is closed, so new ones
wait. Weights carry a label at every moment: while they are exchanged it names no version, and whoever finds such an
engine after a crash knows that it must load it again. Adapters need no pause: each has a name of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from proxy.engines.pool import LOADING, UNLABELLED, Engine, Lane, adapter_name
from proxy.engines.probe import token_logprobs
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.reload.checkpoint import check_policy, check_values, read_probe
from proxy.settings import ProxySettings
from turnwise.errors import EngineError, EngineUnavailable, ReloadFailed
from turnwise.types import PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

NUM_PROBED = 16
"""Tokens of a checkpoint's probe that the engine is asked about."""


class Loader:
    """Brings engines to versions."""

    def __init__(self, settings: ProxySettings, metrics: Metrics, faults: FaultPoints) -> None:
        self._settings = settings
        self._metrics = metrics
        self._faults = faults

    async def check(self, policy: PolicyVersion, engine: Engine) -> None:
        """Check a version's directory, all of it, before any engine hears of it.

        Raises:
            BadCheckpoint: naming what is wrong.
        """
        if is_own_model(policy, engine):
            return
        await asyncio.to_thread(check_policy, policy.path, policy.kind, engine.model_path)
        await asyncio.to_thread(check_values, policy.path)

    async def exchange(self, engine: Engine, target: PolicyVersion, last_good: PolicyVersion | None) -> float:
        """Make the engine serve the target, else the last good version; return how long it sampled nothing, seconds.

        Raises:
            EngineError: the target is not served. An engine that has no way back, or would not take it, is taken out.
        """
        with engine.closed():
            try:
                return await self.load(engine, target)
            except EngineError as error:
                await self._bring_back(engine, last_good, error)
                raise

    async def load(self, engine: Engine, policy: PolicyVersion) -> float:
        """Make the engine serve a version; return how long it sampled nothing, seconds.

        Raises:
            EngineError: it is not certain what the engine serves now.
        """
        seconds = self._settings.reload_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if policy.kind is PolicyKind.LORA:
                    paused = await self._load_base(engine)
                    engine.main = await self._load_adapter(engine, policy)
                    return paused
                return await self._load_weights(engine, policy)
        except TimeoutError as error:
            raise ReloadFailed(
                f"the engine at {engine.url} did not take version {policy.version} within {seconds:g} s "
                "(--reload-timeout-seconds)"
            ) from error

    async def load_beside(self, engine: Engine, policy: PolicyVersion) -> Lane:
        """Load an adapter without serving it to anybody yet.

        Raises:
            EngineError: the engine would not take it.
        """
        await self._load_base(engine)
        return await self._load_adapter(engine, policy)

    async def _load_weights(self, engine: Engine, policy: PolicyVersion) -> float:
        if holds(engine, policy):
            engine.main = engine.own
            return 0.0
        path = engine.model_path if is_own_model(policy, engine) else policy.path
        paused = await self._replace_weights(engine, path, policy.version)
        await self._verify(engine.own, policy)
        return paused

    async def _load_base(self, engine: Engine) -> float:
        """Give an engine whose weights were exchanged its own model back: that is what adapters were trained on."""
        if engine.holds in (UNLABELLED, 0):
            return 0.0
        return await self._replace_weights(engine, engine.model_path, 0)

    async def _load_adapter(self, engine: Engine, policy: PolicyVersion) -> Lane:
        lane = await engine.load_adapter(policy.version, policy.path, seconds=self._settings.reload_timeout_seconds)
        await self._verify(lane, policy)
        return lane

    async def _replace_weights(self, engine: Engine, path: str, version: int) -> float:
        started = time.perf_counter()
        await engine.pause()
        await engine.label_weights(LOADING)
        await engine.load_weights(path, seconds=self._settings.reload_timeout_seconds)
        self._faults.point("mid_reload")
        await engine.label_weights(version)
        engine.main = engine.own
        await engine.resume()
        return time.perf_counter() - started

    async def _verify(self, lane: Lane, policy: PolicyVersion) -> None:
        """Compare what the engine now says with what the trainer saw, where the checkpoint brings a probe."""
        probe = read_probe(policy.path)
        if probe is None:
            return
        positions = probe.positions(NUM_PROBED)
        theirs = await token_logprobs(lane, probe.token_ids, positions)
        gap = max(abs(mine - probe.logprobs[at - 1]) for mine, at in zip(theirs, positions, strict=True))
        if not gap <= self._settings.probe_tolerance:  # also when it is no number
            raise ReloadFailed(
                f"the engine's logprobs are {gap:.3g} nats off the checkpoint's own probe; the limit is "
                f"{self._settings.probe_tolerance:g} (--probe-tolerance)"
            )

    async def _bring_back(self, engine: Engine, last_good: PolicyVersion | None, cause: EngineError) -> None:
        """Put the last good version back before new calls are let in."""
        if last_good is None:
            self.take_out(engine, cause)
            return
        try:
            if isinstance(cause, EngineUnavailable):
                await engine.ask("GET", "/health", seconds=5.0)
            await self.load(engine, last_good)
            await engine.resume()
        except EngineError as error:
            self.take_out(engine, error)

    async def retire(self, engine: Engine, keep: set[int]) -> None:
        """Unload adapters that nothing samples with any more, but for the last: another process may still call it."""
        for version in [version for version in engine.adapters if version not in keep][:-1]:
            if engine.adapters[version].num_calls == 0:
                await engine.unload_adapter(version)

    def take_out(self, engine: Engine, why: Exception | str) -> None:
        """Give an engine no more calls until it has been welcomed again."""
        engine.healthy = False
        self._metrics.engine_up.labels(engine.url).set(0)
        log.error("the engine at %s is taken out: %s", engine.url, why)


def own_model(engine: Engine) -> PolicyVersion:
    """Return the model that the engine was started with, as a version to go back to where none was ever active."""
    return PolicyVersion(version=0, path=engine.model_path)


def is_own_model(policy: PolicyVersion, engine: Engine) -> bool:
    """Say whether a version is the model that the engine was started with, which may lie where only the engine sees."""
    if policy.version != 0 or policy.kind is not PolicyKind.FULL:
        return False
    place = Path(policy.path)
    return not place.is_dir() or place.resolve() == Path(engine.model_path).resolve()


def holds(engine: Engine, policy: PolicyVersion) -> bool:
    """Say whether an engine's own weights are this version."""
    return engine.holds == policy.version or (engine.holds == UNLABELLED and is_own_model(policy, engine))


def serves(engine: Engine, policy: PolicyVersion) -> bool:
    """Say whether calls on the engine sample with this version."""
    if policy.kind is PolicyKind.LORA:
        return engine.main.adapter == adapter_name(policy.version)
    return engine.main is engine.own and holds(engine, policy)
