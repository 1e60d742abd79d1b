"""Bring one policy to the version that the store names: try it, serve it to all, or mark it failed.

All policies follow the store by this code. They differ in how a version is loaded: engines serve the default policy's
versions, and load those of named policies beside them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable

from proxy.metrics import Metrics
from proxy.reload.arms import Arms
from proxy.reload.driver_lease import DriverLease
from proxy.reload.served_versions import ServedVersions
from proxy.settings import ProxySettings
from turnwise.errors import BadCheckpoint, EngineError, ReloadFailed, TurnwiseError
from turnwise.store import policies
from turnwise.store.policies import ServingState
from turnwise.types import DEFAULT_POLICY, PolicyKind, PolicyVersion, utc_now

IsServed = Callable[[PolicyVersion, PolicyVersion | None], bool]
RollOut = Callable[[PolicyVersion, PolicyVersion | None], Awaitable[float]]

log = logging.getLogger(__name__)


class Follower:
    """Follows the store's wish for one policy, in the process that holds the reload lease."""

    def __init__(
        self,
        policy_id: int,
        arms: Arms,
        lease: DriverLease,
        served: ServedVersions,
        settings: ProxySettings,
        metrics: Metrics,
        *,
        is_served: IsServed,
        roll_out: RollOut,
    ) -> None:
        self._policy_id = policy_id
        self.arms = arms
        self._lease = lease
        self._served = served
        self._settings = settings
        self._metrics = metrics
        self._is_served = is_served
        """Returns whether the target, which is active, is where calls need it, beside the hold-out."""
        self._roll_out = roll_out
        """Loads a target in place of the active version; returns how long engines were paused, seconds."""
        self.problem: str | None = None
        """Why the last version was not loaded; None after one that was."""

    def next_step(self, state: ServingState) -> Callable[[], Awaitable[None]] | None:
        """Return the next step towards the target; None if there is nothing to do now.

        The step raises:
            EngineError, BadCheckpoint: the active version could not be loaded again.
            FilesNotRead: a version's files are being read; call again.
        """
        target, active, canary, holdout, arms = state.target, state.active, state.canary, state.holdout, self.arms
        if target is None:
            return None
        if holdout is not None and not self._settings.share_held_out(target.kind):
            return functools.partial(arms.end_holdout, holdout)
        if canary is not None and (state.pinned is not None or not self._settings.canary_share):
            return functools.partial(arms.call_off, canary, active)
        if arms.attempts.is_waiting((canary or target).version):
            return None
        if canary is not None and active is not None:
            return functools.partial(self._advance, canary, active) if arms.is_due else None
        if active is None or target.version != active.version:
            if active is not None and state.pinned is None and arms.is_wanted(target, active):
                return functools.partial(arms.begin, target, active)
            return functools.partial(self._serve, target, active)
        is_served = self._is_served(target, holdout)
        if holdout is not None and (arms.is_lift_due or not is_served):
            return functools.partial(self._measure, active, holdout)
        return None if is_served else functools.partial(self._serve, target, active)

    async def _advance(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        """Start a trial that another process has prepared, or judge it."""
        if await self.arms.wait_for_engine(canary, active):
            return
        if canary.activated_at is None:
            await self.arms.begin(canary, active)
        elif await self.arms.advance(canary, active):
            await self._promote(canary, active)

    async def _measure(self, active: PolicyVersion, holdout: PolicyVersion) -> None:
        """Compare the served version with the hold-out, and load it where it is missing."""
        await self.arms.measure(active, holdout)
        if not self._is_served(active, holdout):
            await self._serve(active, active)

    async def _promote(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        """Serve a version that was on trial to all sessions.

        Every engine has an adapter on trial already: all processes change to it when they read that it is active.
        """
        if canary.kind is PolicyKind.LORA:
            await self._succeed(canary, 0.0)
        else:
            await self._serve(canary, active)

    async def _serve(self, target: PolicyVersion, active: PolicyVersion | None) -> None:
        """Load the target and record that it is served; one that cannot be loaded fails."""
        try:
            seconds = await self._roll_out(target, active)
        except (BadCheckpoint, EngineError) as error:
            if active is not None and active.version == target.version:
                raise
            if not self.arms.attempts.schedule(target.version, error):
                await self._fail(target, error)
            return
        await self._succeed(target, seconds)

    async def _fail(self, target: PolicyVersion, error: TurnwiseError) -> None:
        """Record that the target was not loaded; the last good version stays served."""
        self.problem = f"version {target.version} was not loaded: {error}"
        self._metrics.reloads.labels("failed").inc()
        log.error("%s; the last good version is served", self.problem)
        evidence = error.evidence if isinstance(error, ReloadFailed) else None
        await self._lease.write(policies.fail_policy, target.version, self.problem, evidence)

    async def _succeed(self, target: PolicyVersion, seconds: float) -> None:
        self.arms.stop_draining()
        self.problem = None
        self.arms.attempts.forget(target.version)
        self._metrics.reloads.labels("done").inc()
        if self._policy_id == DEFAULT_POLICY:
            self._metrics.policy_version.set(target.version)
            self._metrics.reload_seconds.observe(seconds)
        log.info(
            "policy version %d of policy %d is served; engines paused for %.0f ms at most",
            target.version,
            self._policy_id,
            seconds * 1000,
        )
        known = self._served.state(self._policy_id)
        is_held = self.arms.holdout_after(target, known.active, known.holdout) is not None
        share = self._settings.share_held_out(target.kind) if is_held else 0.0
        await self._lease.write(policies.activate_policy, target.version, seconds, utc_now(), share)
        await self._served.refresh()
