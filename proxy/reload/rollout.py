"""One policy's way to the version that the store names: first one engine, then the others, retried, or failed.

A version is served to all sessions at once. A feature that lets some sessions sample with another one first, or keeps
some on an older one, extends `Rollout`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from proxy.engines.engine import Engine
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from proxy.reload.lease import DriverLease
from proxy.reload.loader import Loader, serves
from proxy.settings import ProxySettings
from turnwise.errors import BadCheckpoint, EngineError, ReloadFailed, TurnwiseError
from turnwise.store import serving
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

MAX_LOAD_ATTEMPTS = 3
"""Attempts to load a version whose failures may pass, as those of a busy engine do; it fails after the last."""
RETRY_LOAD_SECONDS = 1.0


@dataclasses.dataclass(eq=False)
class Rollout:
    """Brings one policy to the version that the store names.

    It runs in the process that holds the reload lease. All policies are served by this code, whether their versions are
    whole weights or adapters.
    """

    policy_id: int
    database: Database
    lease: DriverLease
    pool: EnginePool
    loader: Loader
    settings: ProxySettings
    metrics: Metrics
    confirm: Callable[..., Awaitable[None]]
    """Tells the proxy's other processes of a change, as `proxy.services.Process.confirm`."""
    problem: str | None = None
    """Why the last version was not loaded; None after one that was."""
    waits_for: str | None = None
    """What it waits for; None if nothing is missing."""
    _failed_version: int = -1
    _num_failures: int = 0
    _not_before: float = 0.0
    """When the next attempt to load it may start, on the monotonic clock."""

    @property
    def state(self) -> serving.ServingState:
        return self.pool.state(self.policy_id)

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

    def is_paused(self, version: PolicyVersion) -> bool:
        """Return whether a version has failed to load, and its next attempt is not due."""
        return version.version == self._failed_version and time.monotonic() < self._not_before

    def engines_for(self, target: PolicyVersion) -> list[Engine]:  # noqa: ARG002
        """Return the serving engines that the target is loaded into."""
        return self.pool.serving

    def is_right(self, engine: Engine) -> bool:
        """Return whether an engine has what this policy's sessions sample with.

        Every engine serves all adapters, so it must have the active one; of whole weights it has one version.
        """
        active = self.state.active
        return active is None or serves(engine, active)

    @property
    def changes(self) -> Mapping[str, Callable[..., Awaitable[None]]]:
        """What to do when another process has told of a change with `confirm`, by its name."""
        return {}

    def note_round(self) -> None:
        """Take the start of a round, in each process, after the store was read."""

    def is_served(self, target: PolicyVersion) -> bool:
        """Return whether the target's engines have it; a call loads a missing adapter."""
        engines = self.engines_for(target)
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
        """Load the target into one engine, then into the others; return how long they were paused at most, seconds."""
        is_adapter = target.kind is PolicyKind.LORA
        engines = self.engines_for(target)
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
        self.problem = f"version {target.version} was not loaded: {error}"
        self.metrics.reloads.labels("failed").inc()
        log.error("%s; the last good version is served", self.problem)
        evidence = error.evidence if isinstance(error, ReloadFailed) else None
        await self.lease.write(serving.fail_version, target.version, self.problem, evidence)

    async def succeed(self, target: PolicyVersion, seconds: float) -> None:
        """Record that the target is served, and how long engines were paused for it, seconds."""
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
        await self.record_served(target, seconds)
        await self.pool.refresh()

    async def record_served(self, target: PolicyVersion, seconds: float) -> None:
        await self.lease.write(serving.activate_version, target.version, seconds)

    def next_step(self) -> Callable[[], Awaitable[None]] | None:
        """Return the next step towards the target; None if there is nothing to do now.

        The step raises `EngineError` or `BadCheckpoint` where the active version could not be loaded again, and
        `FilesNotRead` while a version's files are being read.
        """
        target, active = self.state.target, self.state.active
        if target is None or self.is_paused(target):
            return None
        is_active = active is not None and target.version == active.version
        return None if is_active and self.is_served(target) else functools.partial(self.serve, target, active)
