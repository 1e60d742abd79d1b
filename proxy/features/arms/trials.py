"""Versions on trial and held out: which engine has one, how a trial ends, and how long it waits for a lost engine.

Each policy has its own arms. A canary is a new version that is rolled back if it does worse. The hold-out is an older
version that stays, so that the lift of the served one over it is known: the version that a newly served one replaces
becomes it, and nothing is loaded.

The transaction that creates a session assigns it to the trial or not, so all proxy processes agree, and a session never
changes arms during a trial; sessions from before the trial stay on the served version. An adapter is loaded beside the
served version on every engine; whole weights take a separate engine. The store names the version before an engine
loads it, so that no process sends other calls to that engine. Later versions wait until the trial has ended.

A trial of whole weights that has lost an engine takes no sessions and waits for it. If the engine does not come back,
the trial ends, and the version is served as with a single engine: to all sessions, without a trial.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from proxy.engines.engine import Engine, EngineState
from proxy.features.arms.counts import CANARIES
from proxy.features.arms.draining import CONFIRM_SECONDS, drain, stop_draining
from proxy.features.arms.settings import ArmSettings
from proxy.features.arms.verdict import drift, judge, lift
from proxy.features.probes import probed
from proxy.reload.loader import serves
from proxy.reload.rollout import Rollout
from turnwise.errors import BadCheckpoint, EngineError, FilesNotRead, ReloadFailed
from turnwise.features import arms
from turnwise.features.arms import canary_of, holdout_of
from turnwise.features.estimates import is_certainly_as_good
from turnwise.store import serving, versions
from turnwise.types import DEFAULT_POLICY, Json, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

MIN_ENGINES = 2
"""Serving engines that a trial or a hold-out of whole weights needs."""
MAX_DRIFT_NATS = 1.0
"""Largest KL divergence of a canary from the served version over the checkpoint's own probe, a token."""
JUDGE_SECONDS = 1.0
LIFT_SECONDS = 60.0
ENGINE_SECONDS = 600.0
"""How long a trial of whole weights waits for an engine that it has lost; a large model takes minutes to start."""


@dataclasses.dataclass(eq=False)
class Trials(Rollout):
    """Brings one policy to the version that the store names, by trials and beside a hold-out."""

    _judged_at: float = 0.0
    _measured_at: float = 0.0
    _recorded: Json | None = None
    _lacks_engine_since: float | None = None
    """When a trial of whole weights was found without its engines, on the monotonic clock."""

    @property
    def given(self) -> ArmSettings:
        assert isinstance(self.settings, ArmSettings)
        return self.settings

    def _holdout_after(self, target: PolicyVersion) -> PolicyVersion | None:
        """Return the hold-out once the target is served: the one that there is, else the version served before it.

        Whole weights are held out only beside another engine.
        """
        held = holdout_of(self.state) or self.state.active
        if held is None or held.version >= target.version or not self.given.holdout_share:
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

    def engines_for(self, target: PolicyVersion) -> list[Engine]:
        return self.without_held_out(self._holdout_after(target), target)

    async def record_served(self, target: PolicyVersion, seconds: float) -> None:
        share = 0.0 if self._holdout_after(target) is None else self.given.holdout_share
        await self.lease.write(arms.activate_version, target.version, seconds, share)

    def is_right(self, engine: Engine) -> bool:
        state = self.state
        if super().is_right(engine):
            return True
        is_full = state.active is not None and state.active.kind is PolicyKind.FULL
        return is_full and any(serves(engine, arm) for arm in state.beside.values())

    @property
    def changes(self) -> Mapping[str, Callable[..., Awaitable[None]]]:
        async def drained(engine_url: str) -> None:
            if (engine := self.pool.engine_at(engine_url)) is not None:
                await drain(engine)

        return {"drained": drained}

    def note_round(self) -> None:
        canary = canary_of(self.state)
        if canary is None or not self._lacks_engine(canary):
            self._lacks_engine_since = self.waits_for = None
        if self.policy_id == DEFAULT_POLICY and (canary is None or canary.activated_at is not None):
            stop_draining(self.pool, before=self.pool.read_at)

    async def succeed(self, target: PolicyVersion, seconds: float) -> None:
        self.stop_draining()
        await super().succeed(target, seconds)

    def stop_draining(self) -> None:
        if self.policy_id == DEFAULT_POLICY:
            stop_draining(self.pool)

    def next_step(self) -> Callable[[], Awaitable[None]] | None:
        state, now = self.state, time.monotonic()
        target, active, canary, holdout = state.target, state.active, canary_of(state), holdout_of(state)
        if target is None:
            return None
        if holdout is not None and not self.given.holdout_share:
            return functools.partial(self.end_holdout, holdout)
        if canary is not None and (state.pinned is not None or not self.given.canary_share):
            return functools.partial(self._end, canary, active)
        if self.is_paused(canary or target):
            return None
        if active is None:
            return super().next_step()
        if canary is not None:
            return functools.partial(self._judge, canary, active) if now - self._judged_at >= JUDGE_SECONDS else None
        if target.version != active.version:
            is_tried = state.pinned is None and self.needs_trial(target, active)
            return functools.partial(self.begin, target, active) if is_tried else super().next_step()
        if holdout is not None and (now - self._measured_at >= LIFT_SECONDS or not self.is_served(target)):
            return functools.partial(self._measure, active, holdout)
        return super().next_step()

    async def end_holdout(self, holdout: PolicyVersion) -> None:
        log.info("the hold-out of version %d ends", holdout.version)
        await self.lease.write(arms.end_holdout, holdout.version)
        await self.pool.refresh()

    async def _measure(self, active: PolicyVersion, holdout: PolicyVersion) -> None:
        """Compare the sessions of the hold-out with those of all later versions since it began.

        An engine that came back may have lost the hold-out or the served version, which is loaded again. A hold-out
        that is worse for certain ends: its users get the served version, which becomes the next hold-out once a newer
        one is served.
        """
        self._measured_at = time.monotonic()
        if not (active.kind is PolicyKind.LORA and holdout.kind is PolicyKind.FULL):  # adapters leave the weights
            try:
                await self._place(holdout, active)
            except (BadCheckpoint, EngineError) as error:
                log.warning("the hold-out of version %d cannot be loaded: %s", holdout.version, error)
                await self.end_holdout(holdout)
                return
            self.stop_draining()
        compared = await self.database.fetch(arms.held_out_arms, holdout)
        await self._record(compared, active, holdout)
        if lift(*compared).get("reward", {"low": 0.0})["low"] > 0:
            await self.end_holdout(holdout)
        if not self.is_served(active):
            await self.serve(active, active)

    def needs_trial(self, target: PolicyVersion, active: PolicyVersion) -> bool:
        """Return whether a version is tried first: it is newer than the active one, and there is an engine for it."""
        if not self.given.canary_share or target.version <= active.version:
            return False
        drop = self.given.canary_reward_drop
        if self.given.canary_skips_estimated and is_certainly_as_good(target.metrics, active.version, drop):
            log.info("policy version %d is served without a trial: it was estimated to be as good", target.version)
            return False
        return not self._lacks_engine(target)

    def _lacks_engine(self, version: PolicyVersion) -> bool:
        engines = self.without_held_out(holdout_of(self.state), version)
        return version.kind is PolicyKind.FULL and len(engines) < MIN_ENGINES

    async def _wait_for_engine(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        """Keep a trial without its engines from taking sessions, and end it if it waits too long."""
        now = self._judged_at = time.monotonic()
        if self._lacks_engine_since is None:
            self._lacks_engine_since = now
            self.waits_for = (
                f"the trial of version {canary.version} waits for an engine: it needs {MIN_ENGINES}, and "
                f"{len(self.pool.serving)} serves; after {ENGINE_SECONDS:g} s the version is served without a trial"
            )
            log.warning("%s", self.waits_for)
        if now - self._lacks_engine_since >= ENGINE_SECONDS:
            log.error("the trial of version %d ends: no engine came back", canary.version)
            await self._end(canary, active)
        elif canary.activated_at is not None:
            await self.lease.write(arms.try_version, canary.version, None)
            await self.pool.refresh()

    async def begin(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        """Load a version and start its trial; after a failure that may pass, a later round begins again.

        The store names the version first: from then on no process sends calls to an engine that has its whole weights.
        """
        self.stop_draining()
        for engine in self.pool.serving:  # an earlier attempt may have failed after it loaded the weights
            if engine.base_lane.version == canary.version:
                engine.change(EngineState.DRAINING)
        try:
            await self.loader.check(canary, self.pool.serving[0])
            await self.lease.write(arms.try_version, canary.version, None)
            await self.pool.refresh()
            await self._place(canary, active)
            await self._check_drift(canary, active)
        except (BadCheckpoint, EngineError) as error:
            if not self.schedule_retry(canary.version, error):
                await self._end(canary, active, str(error))
            return
        self.forget_failures()
        if self._is_missing(canary):  # the engine was lost meanwhile
            return
        await self.lease.write(arms.try_version, canary.version, self.given.canary_share)
        self.stop_draining()
        log.info(
            "policy version %d is on trial with %.0f %% of the new sessions",
            canary.version,
            100 * self.given.canary_share,
        )

    async def _judge(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        """Judge a trial, and serve its version to all sessions if it is good; start one that was only prepared."""
        if self._lacks_engine(canary):
            await self._wait_for_engine(canary, active)
            return
        if canary.activated_at is None or self._is_missing(canary):
            await self.begin(canary, active)
            return
        self._judged_at = time.monotonic()
        try:
            await self._place(canary, active)
            self.forget_failures()
            self.stop_draining()
        except (BadCheckpoint, EngineError) as error:
            if not self.schedule_retry(canary.version, error):
                await self._end(canary, active, str(error))
            return
        numbers = canary.version, active.version
        compared = await self.database.fetch(arms.arms_since, canary.activated_at, numbers, self.policy_id)
        await self._record(compared, canary, active)
        verdict = judge(*compared, self.given)
        if verdict is None:
            return
        if not verdict.is_good:
            await self._end(canary, active, verdict.reason)
            return
        log.info("policy version %d is promoted: %s", canary.version, verdict.reason)
        self.metrics.counter(*CANARIES).labels("promoted").inc()
        if canary.kind is PolicyKind.LORA:
            # Each engine has it, and all processes change when they read that it is active.
            await self.succeed(canary, 0.0)
        else:
            await self.serve(canary, active)

    async def _record(self, found: tuple[arms.Arm, arms.Arm], version: PolicyVersion, older: PolicyVersion) -> None:
        newer_arm, older_arm = found
        compared = {
            "canary": newer_arm.summary(version.version),
            "control": older_arm.summary(older.version),
            "lift": lift(newer_arm, older_arm),
        }
        if compared != self._recorded:
            await self.lease.write(arms.record_arms, version.version, compared)
            self._recorded = compared

    async def _place(self, version: PolicyVersion, active: PolicyVersion) -> None:
        engines = self.pool.serving
        if version.kind is PolicyKind.LORA:
            for engine in engines:
                if version.version not in engine.adapters:
                    await self.loader.load(engine, version)
        elif len(engines) > 1 and self._is_missing(version):
            free = self.without_held_out(holdout_of(self.state), version)[-1]
            # No session of the control may sample with it: new calls go elsewhere, and running ones are waited for.
            await asyncio.gather(drain(free), self.confirm(CONFIRM_SECONDS, "drained", free.url))
            await self.loader.exchange(free, version, active)

    def _is_missing(self, version: PolicyVersion) -> bool:
        is_full = version.kind is PolicyKind.FULL
        return is_full and all(engine.base_lane.version != version.version for engine in self.pool.serving)

    async def _check_drift(self, canary: PolicyVersion, active: PolicyVersion) -> None:
        probe = await self.loader.probe(canary, self.pool.serving[0])
        if active.kind is PolicyKind.LORA:
            await self._place(active, active)
        found = [[engine for engine in self.pool.serving if serves(engine, each)] for each in (active, canary)]
        if probe is None or not all(found):
            return
        (control, *_), (tried, *_) = found
        before = await probed(control.lane_of(active), probe)
        after = await probed(tried.lane_of(canary), probe)
        nats = drift(before.values(), after.values())
        if nats > MAX_DRIFT_NATS:
            raise ReloadFailed(
                f"it is {nats:.3g} nats a token from the served version; the limit is {MAX_DRIFT_NATS:g}"
            )

    async def _end(self, canary: PolicyVersion, active: PolicyVersion | None, reason: str | None = None) -> None:
        """End a trial: roll its version back, or without a reason end it without a verdict.

        The engines that have its whole weights are restored, its end is recorded, and only then calls are routed to
        them. An adapter is unloaded once it has no calls.
        """
        for engine in self.pool.serving:
            if active is not None and engine.base_lane.version == canary.version:
                try:
                    await self.loader.exchange(engine, active, None)
                except (BadCheckpoint, EngineError, FilesNotRead) as error:
                    engine.take_out(error)
        if reason is None:
            await self.lease.write(serving.reconsider_version, canary.version)
        else:
            log.error("policy version %d is rolled back: %s", canary.version, reason)
            await self.lease.write(serving.fail_version, canary.version, f"{versions.ROLLED_BACK}: {reason}")
        await self.pool.refresh()
        self.stop_draining()
        self.metrics.counter(*CANARIES).labels("called_off" if reason is None else "rolled_back").inc()
