"""Serve a version to all sessions of its policy: load it into each engine, and record that it is active or failed.

All policies are served by this code, whether their versions are whole weights or adapters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable

from proxy.engines.engine import Engine
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from proxy.reload.driver_lease import DriverLease
from proxy.reload.loader import Loader, serves
from proxy.settings import ProxySettings
from turnwise.errors import BadCheckpoint, EngineError, ReloadFailed, TurnwiseError
from turnwise.store import serving
from turnwise.store.database import Database
from turnwise.store.serving import ServingState
from turnwise.types import DEFAULT_POLICY, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

MIN_ENGINES = 2
"""Serving engines that a trial or a hold-out of whole weights needs."""
MAX_LOAD_ATTEMPTS = 3
"""Attempts to load a version whose failures may pass, as those of a busy engine do; it fails after the last."""
RETRY_LOAD_SECONDS = 1.0
"""Pause before the second attempt; it doubles with each further one."""


@dataclasses.dataclass(eq=False)
class Activation:
    """Serves versions of one policy, in the process that holds the reload lease."""

    policy_id: int
    database: Database
    lease: DriverLease
    pool: EnginePool
    loader: Loader
    settings: ProxySettings
    metrics: Metrics
    reserve: Callable[[Engine], Awaitable[None]]
    """Lets the proxy's other workers send an engine no new calls, and waits for their running ones."""
    problem: str | None = None
    """Why the last version was not loaded; None after one that was."""
    _failed_version: int = -1
    """The version that was not loaded last."""
    _num_failures: int = 0
    _not_before: float = 0.0
    """When the next attempt to load it may start, on the monotonic clock."""

    @property
    def state(self) -> ServingState:
        """The policy's versions, as they were read last."""
        return self.pool.state(self.policy_id)

    def awaits_retry(self, version: int) -> bool:
        """Return whether the next attempt to load a version must not start yet."""
        return version == self._failed_version and time.monotonic() < self._not_before

    def forget_failures(self) -> None:
        self._failed_version, self._num_failures = -1, 0

    def schedule_retry(self, version: int, error: TurnwiseError) -> bool:
        """Schedule another attempt if the failure may pass; return whether one is scheduled."""
        self._num_failures = 1 + (self._num_failures if version == self._failed_version else 0)
        self._failed_version = version
        may_pass = isinstance(error, ReloadFailed) and error.is_transient
        if not may_pass or self._num_failures >= MAX_LOAD_ATTEMPTS:
            self.forget_failures()
            return False
        pause = RETRY_LOAD_SECONDS * 2 ** (self._num_failures - 1)
        self._not_before = time.monotonic() + pause
        self.metrics.reloads.labels("retried").inc()
        log.warning(
            "attempt %d of %d to load policy version %d failed, the next one is in %.0f s: %s",
            self._num_failures,
            MAX_LOAD_ATTEMPTS,
            version,
            pause,
            error,
        )
        return True

    def _holdout_after(self, target: PolicyVersion) -> PolicyVersion | None:
        """Return the hold-out once the target is served: the one that there is, else the version served before it.

        Whole weights are held out only beside another engine.
        """
        held = self.state.holdout or self.state.active
        if held is None or held.version >= target.version or not self.settings.share_held_out(target.kind):
            return None
        needs_engine = target.kind is PolicyKind.FULL
        return None if needs_engine and len(self.pool.serving) < MIN_ENGINES else held

    def without_held_out(self, holdout: PolicyVersion | None, target: PolicyVersion) -> list[Engine]:
        """Return the serving engines that the target may be loaded into: one keeps the hold-out's whole weights."""
        engines = self.pool.serving
        if target.kind is PolicyKind.LORA:
            return engines
        kept = [engine for engine in engines if holdout is not None and serves(engine, holdout)]
        return [engine for engine in engines if engine is not kept[-1]] if kept and len(engines) > 1 else engines

    def is_served(self, target: PolicyVersion) -> bool:
        """Return whether engines have the target, save one that keeps the hold-out; a call loads a missing adapter."""
        engines = self.without_held_out(self.state.holdout, target)
        if target.kind is PolicyKind.LORA:
            return all(engine.has_own_model for engine in engines)
        return all(serves(engine, target) for engine in engines)

    async def serve(self, target: PolicyVersion, active: PolicyVersion | None) -> None:
        """Load the target and record that it is served; one that cannot be loaded fails.

        Raises:
            EngineError, BadCheckpoint: the target, which is the active version, could not be loaded again.
            FilesNotRead: its files are being read; call again.
        """
        try:
            seconds = await self._roll_out(target, active)
        except (BadCheckpoint, EngineError) as error:
            if active is not None and active.version == target.version:
                raise
            if not self.schedule_retry(target.version, error):
                await self._fail(target, error)
            return
        await self.succeed(target, seconds)

    async def _roll_out(self, target: PolicyVersion, active: PolicyVersion | None) -> float:
        """Load the target into one engine, then into the others; return how long they were paused at most, seconds.

        Raises:
            BadCheckpoint, EngineError: the first engine did not load it. One that fails later is taken out, unless it
                only lacks the adapter of a named policy.
            FilesNotRead: its files are being read; call again.
        """
        is_adapter = target.kind is PolicyKind.LORA
        engines = self.without_held_out(self._holdout_after(target), target)
        lacking = [engine for engine in engines if is_adapter or not serves(engine, target)]
        is_proven = len(lacking) < len(engines) or (active is not None and active.version == target.version)
        seconds = 0.0
        if lacking:
            await self.loader.check(target, lacking[0])
        if lacking and not is_proven:
            first = lacking.pop(0)
            seconds = await self.loader.exchange(first, target, active or first.own_model)
        outcomes = await asyncio.gather(
            *(self.loader.exchange(engine, target, None) for engine in lacking), return_exceptions=True
        )
        for engine, outcome in zip(lacking, outcomes, strict=True):
            if isinstance(outcome, BadCheckpoint | EngineError):
                if self.policy_id == DEFAULT_POLICY:
                    engine.take_out(outcome)
                else:
                    log.warning("version %d will be loaded at its first call: %s", target.version, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                seconds = max(seconds, outcome)
        return seconds

    async def _fail(self, target: PolicyVersion, error: TurnwiseError) -> None:
        """Record that the target was not loaded; the last good version stays served."""
        self.problem = f"version {target.version} was not loaded: {error}"
        self.metrics.reloads.labels("failed").inc()
        log.error("%s; the last good version is served", self.problem)
        evidence = error.evidence if isinstance(error, ReloadFailed) else None
        await self.lease.write(serving.fail_version, target.version, self.problem, evidence)

    async def succeed(self, target: PolicyVersion, seconds: float) -> None:
        """Record that the target is served, and how long engines were paused for it, seconds."""
        self.stop_draining()
        self.problem = None
        self.forget_failures()
        self.metrics.reloads.labels("done").inc()
        if self.policy_id == DEFAULT_POLICY:
            self.metrics.policy_version.set(target.version)
            self.metrics.reload_seconds.observe(seconds)
        log.info(
            "policy version %d of policy %d is served; engines paused for %.0f ms at most",
            target.version,
            self.policy_id,
            seconds * 1000,
        )
        share = 0.0 if self._holdout_after(target) is None else self.settings.share_held_out(target.kind)
        await self.lease.write(serving.activate_version, target.version, seconds, share)
        await self.pool.refresh()

    def stop_draining(self) -> None:
        """Send new calls to all engines again; only the default policy, whose weights may be whole, drains engines."""
        if self.policy_id == DEFAULT_POLICY:
            self.pool.stop_draining()
