"""Arms: a share of the new sessions samples with another version than the served one.

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
import logging
import time
from collections.abc import Awaitable, Callable

from proxy.engines.engine import Engine
from proxy.engines.pool import EnginePool
from proxy.engines.state import EngineState
from proxy.metrics import Metrics
from proxy.reload.driver_lease import DriverLease
from proxy.reload.loader import Loader, serves
from proxy.reload.served_versions import ServedVersions
from proxy.reload.verdict import drift, judge
from proxy.settings import ProxySettings
from turnwise.errors import BadCheckpoint, EngineError, FilesNotRead, ReloadFailed, TurnwiseError
from turnwise.store import policies
from turnwise.store.arms import Arm, arms_since, held_out_arms, lift
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, Json, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

JUDGE_SECONDS = 1.0
"""How often the arms are compared."""
LIFT_SECONDS = 60.0
"""How often the served version is compared with the hold-out."""
NUM_ENGINES = 2
"""Serving engines that a trial of whole weights needs."""
ENGINE_SECONDS = 600.0
"""How long a trial of whole weights waits for an engine that it has lost; a large model takes minutes to start."""
MAX_LOAD_ATTEMPTS = 3
"""Attempts to load a version whose failures may pass, as those of a busy engine do; it fails after the last."""
RETRY_LOAD_SECONDS = 1.0
"""Pause before the second attempt; it doubles with each further one."""
DRAIN_SECONDS = 10.0
"""How long an engine waits for its running calls before a trial's whole weights are loaded; longer calls span both."""


@dataclasses.dataclass(eq=False)
class Arms:
    """Begins, judges and ends the trials and the hold-out of one policy, in the process that holds the reload lease."""

    policy_id: int
    database: Database
    lease: DriverLease
    pool: EnginePool
    loader: Loader
    served: ServedVersions
    settings: ProxySettings
    metrics: Metrics
    reserve: Callable[[Engine], Awaitable[None]]
    """Lets the proxy's other workers send an engine no new calls, and waits for their running ones."""
    waits_for: str | None = None
    """What a trial waits for; None if nothing is missing."""
    _judged_at: float = 0.0
    _measured_at: float = 0.0
    _recorded: Json | None = None
    """The arms that this process has stored last."""
    _lacks_engine_since: float | None = None
    """When a trial of whole weights was found without its engines, on the monotonic clock."""
    _failed_version: int = -1
    """The version that was not loaded last."""
    _num_failures: int = 0
    _not_before: float = 0.0
    """When the next attempt to load it may start, on the monotonic clock."""

    @property
    def is_due(self) -> bool:
        """Whether the arms should be compared now."""
        return time.monotonic() - self._judged_at >= JUDGE_SECONDS

    @property
    def is_lift_due(self) -> bool:
        """Whether the served version should be compared with the hold-out now."""
        return time.monotonic() - self._measured_at >= LIFT_SECONDS

    def awaits_retry(self, version: int) -> bool:
        """Return whether the next attempt to load a version must not start yet."""
        return version == self._failed_version and time.monotonic() < self._not_before

    def forget_failures(self) -> None:
        """Forget the failed attempts to load a version, after one that succeeded or the last."""
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

    def holdout_after(
        self, target: PolicyVersion, active: PolicyVersion | None, holdout: PolicyVersion | None
    ) -> PolicyVersion | None:
        """Return the hold-out once the target is served: the one that there is, else the version served before it.

        Whole weights are held out only beside another engine.
        """
        held = holdout or active
        if held is None or held.version >= target.version or not self.settings.share_held_out(target.kind):
            return None
        needs_engine = target.kind is PolicyKind.FULL
        return None if needs_engine and len(self.pool.serving) < NUM_ENGINES else held

    def without_held_out(self, holdout: PolicyVersion | None, target: PolicyVersion) -> list[Engine]:
        """Return the serving engines that the target may be loaded into: one keeps the hold-out's whole weights."""
        serving = self.pool.serving
        if target.kind is PolicyKind.LORA:
            return serving
        kept = [engine for engine in serving if holdout is not None and serves(engine, holdout)]
        return [engine for engine in serving if engine is not kept[-1]] if kept and len(serving) > 1 else serving

    async def end_holdout(self, holdout: PolicyVersion) -> None:
        """Serve all new sessions with the served version; the next version that is served starts another hold-out."""
        log.info("the hold-out of version %d ends", holdout.version)
        await self.lease.write(policies.end_holdout, holdout.version)
        await self.served.refresh()

    async def measure(self, active: PolicyVersion, holdout: PolicyVersion) -> None:
        """Compare the sessions of the hold-out with those of all later versions since it began.

        An engine that came back may have lost the hold-out; it is loaded again. A hold-out that is worse for certain
        ends: its users get the served version, which becomes the next hold-out once a newer one is served.
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
        arms = await self.database.fetch(held_out_arms, holdout)
        await self._record(arms, active, holdout)
        if lift(*arms).get("reward", {"low": 0.0})["low"] > 0:
            await self.end_holdout(holdout)

    def is_wanted(self, target: PolicyVersion, active: PolicyVersion) -> bool:
        """Return whether a version needs a trial: it is newer than the active one, and there is an engine for it."""
        if not self.settings.canary_share or target.version <= active.version:
            return False
        return not self._lacks_engine(target)

    def _lacks_engine(self, policy: PolicyVersion) -> bool:
        holdout = self.served.state(self.policy_id).holdout
        return policy.kind is PolicyKind.FULL and len(self.without_held_out(holdout, policy)) < NUM_ENGINES

    def note_engines(self, policy: PolicyVersion | None) -> None:
        """Note that no trial, or one with all its engines, waits for none; another process may have driven it."""
        if policy is None or not self._lacks_engine(policy):
            self._lacks_engine_since = self.waits_for = None

    async def wait_for_engine(self, policy: PolicyVersion, active: PolicyVersion) -> bool:
        """Keep a trial without its engines from taking sessions, and end it if it waits too long.

        Returns:
            Whether an engine is missing.
        """
        if not self._lacks_engine(policy):
            return False
        now = self._judged_at = time.monotonic()
        if self._lacks_engine_since is None:
            self._lacks_engine_since = now
            self.waits_for = (
                f"the trial of version {policy.version} waits for an engine: it needs {NUM_ENGINES}, and "
                f"{len(self.pool.serving)} serves; after {ENGINE_SECONDS:g} s the version is served without a trial"
            )
            log.warning("%s", self.waits_for)
        if now - self._lacks_engine_since >= ENGINE_SECONDS:
            log.error("the trial of version %d ends: no engine came back", policy.version)
            await self.call_off(policy, active)
        elif policy.activated_at is not None:
            await self.lease.write(policies.try_policy, policy.version, None)
            await self.served.refresh()
        return True

    async def begin(self, policy: PolicyVersion, active: PolicyVersion) -> None:
        """Load a version and start its trial; after a failure that may pass, a later round begins again.

        The store names the version first: from then on no process sends calls to an engine that has its whole weights.
        """
        self.stop_draining()
        for engine in self.pool.serving:  # an earlier attempt may have failed after it loaded the weights
            if engine.base_lane.version == policy.version:
                engine.change(EngineState.DRAINING)
        try:
            await self.loader.check(policy, self.pool.serving[0])
            await self.lease.write(policies.try_policy, policy.version, None)
            await self.served.refresh()
            await self._place(policy, active)
            await self._check_drift(policy, active)
        except (BadCheckpoint, EngineError) as error:
            if not self.schedule_retry(policy.version, error):
                await self._withdraw(policy, active, str(error))
            return
        self.forget_failures()
        if self._is_missing(policy):  # the engine was lost meanwhile
            return
        await self.lease.write(policies.try_policy, policy.version, self.settings.canary_share)
        self.stop_draining()
        log.info(
            "policy version %d is on trial with %.0f %% of the new sessions",
            policy.version,
            100 * self.settings.canary_share,
        )

    async def advance(self, policy: PolicyVersion, active: PolicyVersion) -> bool:
        """Judge the trial; return True if the version is to be promoted."""
        self._judged_at = time.monotonic()
        if policy.kind is PolicyKind.FULL and self._is_missing(policy):
            await self.begin(policy, active)
            return False
        try:
            await self._place(policy, active)
            self.forget_failures()
            self.stop_draining()
        except (BadCheckpoint, EngineError) as error:
            if not self.schedule_retry(policy.version, error):
                await self._withdraw(policy, active, str(error))
            return False
        assert policy.activated_at is not None, "the trial has started"
        versions = policy.version, active.version
        arms = await self.database.fetch(arms_since, policy.activated_at, versions, self.policy_id)
        await self._record(arms, policy, active)
        verdict = judge(*arms, self.settings)
        if verdict is None:
            return False
        if not verdict.is_good:
            await self._withdraw(policy, active, verdict.reason)
            return False
        log.info("policy version %d is promoted: %s", policy.version, verdict.reason)
        self.metrics.canaries.labels("promoted").inc()
        return True

    async def call_off(self, policy: PolicyVersion, active: PolicyVersion | None) -> None:
        """End a trial without a verdict, because a version was pinned or the canary share is 0 now."""
        await self._end("called_off", policy, active, policies.reconsider_policy)

    async def _record(self, arms: tuple[Arm, Arm], policy: PolicyVersion, active: PolicyVersion) -> None:
        """Store what the version is judged by, if it has changed."""
        canary, control = arms
        compared = {
            "canary": canary.summary(policy.version),
            "control": control.summary(active.version),
            "lift": lift(canary, control),
        }
        if compared != self._recorded:
            await self.lease.write(policies.record_arms, policy.version, compared)
            self._recorded = compared

    async def _place(self, policy: PolicyVersion, active: PolicyVersion) -> None:
        """Load the version where it is missing: an adapter on each engine, whole weights on one."""
        serving = self.pool.serving
        if policy.kind is PolicyKind.LORA:
            for engine in serving:
                if policy.version not in engine.adapters:
                    await self.loader.load(engine, policy)
        elif len(serving) > 1 and self._is_missing(policy):
            free = self.without_held_out(self.served.state(self.policy_id).holdout, policy)[-1]
            await self._drain(free)
            await self.loader.exchange(free, policy, active)

    def _is_missing(self, policy: PolicyVersion) -> bool:
        """Return whether no engine samples with a version of whole weights."""
        is_full = policy.kind is PolicyKind.FULL
        return is_full and all(engine.base_lane.version != policy.version for engine in self.pool.serving)

    async def _drain(self, engine: Engine) -> None:
        """Route new calls to other engines and wait for the running ones: no control session may sample the canary."""
        await asyncio.gather(self.pool.drain(engine, DRAIN_SECONDS), self.reserve(engine))

    async def _check_drift(self, policy: PolicyVersion, active: PolicyVersion) -> None:
        """Check that a version is near enough to the served one for a trial.

        Raises:
            ReloadFailed: it is not.
        """
        probe = await self.loader.probe(policy, self.pool.serving[0])
        if active.kind is PolicyKind.LORA:
            await self._place(active, active)
        found = [[engine for engine in self.pool.serving if serves(engine, each)] for each in (active, policy)]
        if probe is None or not all(found):
            return
        (control, *_), (tried, *_) = found
        before = await self.loader.probed(control.lane_of(active), probe)
        nats = drift(before, await self.loader.probed(tried.lane_of(policy), probe))
        limit = self.settings.canary_drift_nats
        if nats > limit:
            raise ReloadFailed(f"it is {nats:.3g} nats a token from the served version; the limit is {limit:g}")

    async def _withdraw(self, policy: PolicyVersion, active: PolicyVersion, reason: str) -> None:
        """Roll a version back and mark it failed."""
        log.error("policy version %d is rolled back: %s", policy.version, reason)
        await self._end("rolled_back", policy, active, policies.fail_policy, f"{policies.ROLLED_BACK}: {reason}")

    async def _end(
        self,
        outcome: str,
        policy: PolicyVersion,
        active: PolicyVersion | None,
        change: Callable[..., object],
        *arguments: str,
    ) -> None:
        """End a trial: restore the engines that have its whole weights, record its end, and only then route to them.

        An adapter is unloaded once it has no calls.
        """
        for engine in self.pool.serving:
            if active is not None and engine.base_lane.version == policy.version:
                try:
                    await self.loader.exchange(engine, active, None)
                except (BadCheckpoint, EngineError, FilesNotRead) as error:
                    self.loader.take_out(engine, error)
        await self.lease.write(change, policy.version, *arguments)
        await self.served.refresh()
        self.stop_draining()
        self.metrics.canaries.labels(outcome).inc()

    def stop_draining(self) -> None:
        """Send new calls to all engines again; only the default policy, whose weights may be whole, drains engines."""
        if self.policy_id == DEFAULT_POLICY:
            self.pool.stop_draining()
