"""A new version is tried by a share of the sessions first, and withdrawn without a person when it does worse.

One decision: which arm a session is in follows from its id, the version and the instant the trial began, so every proxy
process agrees and a session never changes arms while its version lasts; sessions from before stay where they were. An
adapter is tried beside the served version on every engine; whole weights take an engine of their own. While a version
is tried, later ones wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import math
import statistics
import time
from collections.abc import Sequence
from hashlib import blake2b

from proxy.engines.pool import Engine, EnginePool
from proxy.engines.probe import token_logprobs
from proxy.metrics import Metrics
from proxy.reload.checkpoint import read_probe
from proxy.reload.loader import NUM_PROBED, Loader
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import BadCheckpoint, EngineError
from turnwise.store import policies
from turnwise.store.arms import Arm, arms_since
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyVersion, Session

log = logging.getLogger(__name__)

NUM_STANDARD_ERRORS = 2.0
"""How sure a judgement is: about 2.5 % of the draws lie beyond."""
JUDGE_SECONDS = 1.0
"""How often the arms are compared."""
POLLS_UNTIL_KNOWN = 3.0
"""Looks at the store after which every proxy process knows of a trial; sessions from before then are not in it."""
DRAIN_SECONDS = 10.0
"""How long calls may still run on an engine before it takes whole weights to try; those that last longer span both."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A canary under way."""

    version: int
    share: float
    """Of new sessions."""
    since: datetime.datetime

    def takes(self, session: Session) -> bool:
        """Say whether the session is one of the trial's."""
        if session.created_at < self.since:
            return False
        digest = blake2b(f"{self.version} {session.tenant} {session.session_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ends."""

    is_good: bool
    reason: str


def judge(canary: Arm, control: Arm, settings: ProxySettings) -> Verdict | None:
    """Compare the arms; None asks for more sessions.

    The canary goes when its broken turns, or its mean reward, are worse than the others' by more than the limit, and
    by more than `NUM_STANDARD_ERRORS` standard errors of the difference (Welch's, no equal variances assumed); it stays
    when it is as surely not. After `canary_max_sessions` the mean alone decides, and without rewards the broken turns.
    """
    enough = settings.canary_min_sessions
    if min(canary.num_sessions, control.num_sessions) < enough:
        return None
    rise = _share(canary.num_broken, canary.num_turns) - _share(control.num_broken, control.num_turns)
    spread = math.hypot(*(_share_error(arm.num_broken, arm.num_turns) for arm in (canary, control)))
    if rise - NUM_STANDARD_ERRORS * spread > settings.canary_broken_rise:
        return Verdict(
            False, f"{rise:.1%} more of its turns are broken; the limit is {settings.canary_broken_rise:.1%}"
        )
    is_long = canary.num_sessions >= settings.canary_max_sessions
    if min(len(canary.rewards), len(control.rewards)) < enough:
        return Verdict(True, f"no more than {rise:+.1%} broken turns, and hardly any rewards") if is_long else None
    difference, error = _difference(canary.rewards, control.rewards)
    margin = 0.0 if is_long else NUM_STANDARD_ERRORS * error
    measured = (
        f"mean session reward {difference:+.3f} ± {error:.3f} over {len(canary.rewards)} sessions against "
        f"{len(control.rewards)}; the limit is {-settings.canary_reward_drop:+.3f}"
    )
    if difference + margin < -settings.canary_reward_drop:
        return Verdict(False, measured)
    if difference - margin >= -settings.canary_reward_drop:
        return Verdict(True, measured)
    return None


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the difference of the means and its standard error after Welch."""
    errors = [statistics.stdev(rewards) / math.sqrt(len(rewards)) for rewards in (ours, theirs)]
    return statistics.fmean(ours) - statistics.fmean(theirs), math.hypot(*errors)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _share_error(part: int, whole: int) -> float:
    share = _share(part, whole)
    return math.sqrt(share * (1 - share) / whole) if whole else 0.0


def drift(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the mean KL divergence of the new policy from the old over a text, nats a token, never negative.

    The k3 estimator of http://joschu.net/blog/kl-approx.html, for a text that the old policy sampled:
    r − 1 − log r with r = p_after / p_before.
    """
    differences = [new - old for old, new in zip(before, after, strict=True)]
    return statistics.fmean(math.expm1(each) - each for each in differences) if differences else 0.0


class Canary:
    """Begins trials, judges them and ends them; called by the one process that drives."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        pool: EnginePool,
        loader: Loader,
        settings: ProxySettings,
        metrics: Metrics,
    ) -> None:
        self._database = database
        self._writer = writer
        self._pool = pool
        self._loader = loader
        self._settings = settings
        self._metrics = metrics
        self._judged_at = 0.0

    def show(self, policy: PolicyVersion | None) -> None:
        """Let the pool know of the trial that the store tells of."""
        self._pool.trial = None if policy is None else self._trial(policy)

    def _trial(self, policy: PolicyVersion) -> Trial:
        assert policy.activated_at is not None
        settling = datetime.timedelta(seconds=POLLS_UNTIL_KNOWN * self._settings.policies_poll_seconds)
        return Trial(policy.version, self._settings.canary_share, policy.activated_at + settling)

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare the arms."""
        return time.monotonic() - self._judged_at >= JUDGE_SECONDS

    def is_wanted(self, target: PolicyVersion, active: PolicyVersion) -> bool:
        """Say whether a version is tried first: it is newer than the active one, and there is a place to try it."""
        if not self._settings.canary_share or target.version <= active.version:
            return False
        return target.kind is PolicyKind.LORA or len(self._pool.healthy) > 1

    async def begin(self, policy: PolicyVersion, active: PolicyVersion) -> None:
        """Load a version for its trial and let its share of the new sessions have it.

        An engine that has taken whole weights gets no call until the pool knows which sessions are in the trial.
        """
        for engine in self._pool.healthy:  # an earlier try may have come so far, and then failed
            engine.draining = engine.version == policy.version
        try:
            await self._loader.check(policy, self._pool.healthy[0])
            await self._place(policy, active)
            reason = await self._drifted(policy)
        except (BadCheckpoint, EngineError) as error:
            reason = str(error)
        if reason is not None:
            await self._withdraw(policy, active, reason)
            return
        self.show(await self._writer.do(policies.try_policy, policy.version))
        self._pool.let_all_in()
        log.info(
            "policy version %d is tried by %.0f %% of new sessions", policy.version, 100 * self._settings.canary_share
        )

    async def advance(self, policy: PolicyVersion, active: PolicyVersion) -> bool:
        """Judge the trial; True promotes the version."""
        self._judged_at = time.monotonic()
        try:
            await self._place(policy, active)
            self._pool.let_all_in()
        except (BadCheckpoint, EngineError) as error:
            await self._withdraw(policy, active, str(error))
            return False
        arms = await asyncio.to_thread(self._arms, policy, active)
        verdict = judge(*arms, self._settings)
        if verdict is None:
            return False
        if not verdict.is_good:
            await self._withdraw(policy, active, verdict.reason)
            return False
        log.info("policy version %d is promoted: %s", policy.version, verdict.reason)
        self._metrics.canaries.labels("promoted").inc()
        return True

    async def call_off(self, policy: PolicyVersion, active: PolicyVersion | None) -> None:
        """End a trial without a judgement, because a person pinned a version."""
        await self._writer.do(policies.reconsider_policy, policy.version)
        await self._clear(policy, active)
        self._metrics.canaries.labels("called_off").inc()

    def _arms(self, policy: PolicyVersion, active: PolicyVersion) -> tuple[Arm, Arm]:
        with self._database.read() as connection:
            return arms_since(connection, self._trial(policy).since, (policy.version, active.version))

    async def _place(self, policy: PolicyVersion, active: PolicyVersion) -> None:
        """See to it that the version is loaded: an adapter on each engine, whole weights on one."""
        healthy = self._pool.healthy
        if policy.kind is PolicyKind.LORA:
            for engine in healthy:
                if policy.version not in engine.adapters:
                    await self._loader.load_beside(engine, policy)
        elif len(healthy) > 1 and all(engine.version != policy.version for engine in healthy):
            await self._drain(healthy[-1])
            await self._loader.exchange(healthy[-1], policy, active)

    async def _drain(self, engine: Engine) -> None:
        """Send new calls elsewhere and wait for the running ones, so that no session of the others sees the trial."""
        engine.draining = True
        deadline = time.monotonic() + DRAIN_SECONDS
        while engine.main.num_calls and time.monotonic() < deadline:  # noqa: ASYNC110  once in a trial
            await asyncio.sleep(0.02)

    async def _drifted(self, policy: PolicyVersion) -> str | None:
        """Return why the version is too far from the served one to be tried at all, None when it is not."""
        probe = read_probe(policy.path)
        lanes = [engine.main for engine in self._pool.healthy]
        tried = [lane for lane in lanes if lane.version == policy.version]
        tried += [engine.adapters[policy.version] for engine in self._pool.healthy if policy.version in engine.adapters]
        control = [lane for lane in lanes if lane.version != policy.version]
        if probe is None or not tried or not control:
            return None
        positions = probe.positions(NUM_PROBED)
        before = await token_logprobs(control[0], probe.token_ids, positions)
        far = drift(before, await token_logprobs(tried[0], probe.token_ids, positions))
        if far <= self._settings.canary_drift_nats:
            return None
        return (
            f"it is {far:.3g} nats a token from the served version; the limit is {self._settings.canary_drift_nats:g}"
        )

    async def _withdraw(self, policy: PolicyVersion, active: PolicyVersion, reason: str) -> None:
        """Roll a version back: nobody samples with it any more, and it is marked failed."""
        log.error("policy version %d is rolled back: %s", policy.version, reason)
        await self._writer.do(policies.fail_policy, policy.version, f"rolled back as a canary: {reason}")
        await self._clear(policy, active)
        self._metrics.canaries.labels("rolled_back").inc()

    async def _clear(self, policy: PolicyVersion, active: PolicyVersion | None) -> None:
        """Bring engines that hold whole weights under trial back; an adapter is unloaded once nobody calls it."""
        for engine in self._pool.healthy:
            if active is not None and engine.main is engine.own and engine.version == policy.version:
                await self._loader.exchange(engine, active, None)
        self._pool.trial = None
        self._pool.let_all_in()
