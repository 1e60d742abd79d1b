"""Bring one policy to the version that the store names: try it, serve it to all, or mark it failed.

All policies follow the store by this code, whether their versions are whole weights or adapters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable

from proxy.reload.arms import Arms
from proxy.reload.loader import own_model, serves
from turnwise.errors import BadCheckpoint, EngineError, ReloadFailed, TurnwiseError
from turnwise.store import policies
from turnwise.store.policies import ServingState
from turnwise.types import DEFAULT_POLICY, PolicyKind, PolicyVersion, utc_now

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Follower(Arms):
    """Follows the store's wish for one policy, in the process that holds the reload lease."""

    problem: str | None = None
    """Why the last version was not loaded; None after one that was."""

    def next_step(self, state: ServingState) -> Callable[[], Awaitable[None]] | None:
        """Return the next step towards the target; None if there is nothing to do now.

        The step raises:
            EngineError, BadCheckpoint: the active version could not be loaded again.
            FilesNotRead: a version's files are being read; call again.
        """
        target, active, canary, holdout = state.target, state.active, state.canary, state.holdout
        if target is None:
            return None
        if holdout is not None and not self.settings.share_held_out(target.kind):
            return functools.partial(self.end_holdout, holdout)
        if canary is not None and (state.pinned is not None or not self.settings.canary_share):
            return functools.partial(self.call_off, canary, active)
        if self.awaits_retry((canary or target).version):
            return None
        if canary is not None and active is not None:
            return functools.partial(self._advance, canary, active) if self.is_due else None
        if active is None or target.version != active.version:
            if active is not None and state.pinned is None and self.is_wanted(target, active):
                return functools.partial(self.begin, target, active)
            return functools.partial(self._serve, target, active)
        is_served = self._is_served(target, holdout)
        if holdout is not None and (self.is_lift_due or not is_served):
            return functools.partial(self._measure, active, holdout)
        return None if is_served else functools.partial(self._serve, target, active)

    def _is_served(self, target: PolicyVersion, holdout: PolicyVersion | None) -> bool:
        """Return whether engines have the target, save one that keeps the hold-out; a call loads a missing adapter."""
        engines = self.without_held_out(holdout, target)
        if target.kind is PolicyKind.LORA:
            return all(engine.has_own_model for engine in engines)
        return all(serves(engine, target) for engine in engines)

    async def _advance(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        """Start a trial that another process has prepared, or judge it."""
        if await self.wait_for_engine(canary, active):
            return
        if canary.activated_at is None:
            await self.begin(canary, active)
        elif await self.advance(canary, active):
            await self._promote(canary, active)

    async def _measure(self, active: PolicyVersion, holdout: PolicyVersion) -> None:
        """Compare the served version with the hold-out, and load it where it is missing."""
        await self.measure(active, holdout)
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
            if not self.schedule_retry(target.version, error):
                await self._fail(target, error)
            return
        await self._succeed(target, seconds)

    async def _roll_out(self, target: PolicyVersion, active: PolicyVersion | None) -> float:
        """Load the target into one engine, then into the others; return how long they were paused at most, seconds.

        Raises:
            BadCheckpoint, EngineError: the first engine did not load it. One that fails later is taken out, unless it
                only lacks the adapter of a named policy.
            FilesNotRead: its files are being read; call again.
        """
        is_adapter = target.kind is PolicyKind.LORA
        holdout = self.holdout_after(target, active, self.served.state(self.policy_id).holdout)
        engines = self.without_held_out(holdout, target)
        await self.loader.compare_with_own_model(target, engines)
        behind = [engine for engine in engines if is_adapter or not serves(engine, target)]
        is_proven = len(behind) < len(engines) or (active is not None and active.version == target.version)
        seconds = 0.0
        if behind:
            await self.loader.check(target, behind[0])
        if behind and not is_proven:
            first = behind.pop(0)
            seconds = await self.loader.exchange(first, target, active or own_model(first))
        outcomes = await asyncio.gather(
            *(self.loader.exchange(engine, target, None) for engine in behind), return_exceptions=True
        )
        for engine, outcome in zip(behind, outcomes, strict=True):
            if isinstance(outcome, BadCheckpoint | EngineError):
                if self.policy_id == DEFAULT_POLICY:
                    self.loader.take_out(engine, outcome)
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
        await self.lease.write(policies.fail_policy, target.version, self.problem, evidence)

    async def _succeed(self, target: PolicyVersion, seconds: float) -> None:
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
        known = self.served.state(self.policy_id)
        is_held = self.holdout_after(target, known.active, known.holdout) is not None
        share = self.settings.share_held_out(target.kind) if is_held else 0.0
        await self.lease.write(policies.activate_policy, target.version, seconds, utc_now(), share)
        await self.served.refresh()
