"""New weights under running agents: every engine follows the version that the store says should be served.

One process drives at a time, by a lease in the store; the others learn from the engines' labels. Engines go one after
the other: the first to take a version proves it, before the others hear of it. A version that it will not take is
marked failed, and the last good one stays served. An engine that fails after that is taken out, and brought to the
active version before it gets calls again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from proxy.engines.pool import HEALTH_SECONDS, UNLABELLED, Engine, EnginePool
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.reload.canary import Canary
from proxy.reload.loader import Loader, own_model, serves
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import BadCheckpoint, EngineError, EngineUnsuitable, LeaseLost, StoreError, TurnwiseError
from turnwise.store import leases, policies
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyStatus, PolicyVersion, utc_now

log = logging.getLogger(__name__)
LEASE = "reload"
LEASE_SECONDS = 2.0
"""The lease is renewed while its holder lives, so that a reload which a crash cut off is taken over this soon."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the store says should be served."""

    target: PolicyVersion | None
    """The pinned version, or the newest that has not failed."""
    active: PolicyVersion | None
    """The version that is being served."""
    canary: PolicyVersion | None
    """The version that a share of the sessions tries."""
    is_pinned: bool
    """Whether a person decided what is served."""


class Reloader:
    """Keeps engines on the wanted version."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        pool: EnginePool,
        settings: ProxySettings,
        metrics: Metrics,
        *,
        learn: Callable[[Engine], Awaitable[None]],
        faults: FaultPoints | None = None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._learn = learn
        self._loader = Loader(settings, metrics, faults or FaultPoints())
        self._canary = Canary(database, writer, pool, self._loader, settings, metrics)
        self._owner = uuid.uuid4().hex
        self._turn = asyncio.Lock()
        self._learning = asyncio.Lock()
        self._token: int | None = None
        self.last_error: str | None = None
        """Why the last reload failed; None after one that worked."""

    async def start(self) -> None:
        """Look at the engines once before the first request; what is not there yet is awaited by `run`.

        Raises:
            EngineUnsuitable: an engine lacks what exact capture needs, and the check is strict.
        """
        await self._check_engines(self._pool.engines)

    async def run(self) -> None:
        """Watch the store and the engines for ever."""
        checked_at = 0.0
        while True:
            try:
                if time.monotonic() - checked_at >= HEALTH_SECONDS:
                    checked_at = time.monotonic()
                    await self._check_engines(self._pool.engines)
                else:
                    await self._check_engines([engine for engine in self._pool.engines if not engine.healthy])
                await self._follow()
            except TurnwiseError as error:
                self._metrics.background_errors.labels("reload").inc()
                log.warning("the reloader could not finish a round: %s", error)
            except Exception:  # the task's outermost edge: it must outlive whatever one round throws at it
                self._metrics.background_errors.labels("reload").inc()
                log.exception("the reloader failed a round")
            await asyncio.sleep(self._settings.policies_poll_seconds)

    async def _wanted(self) -> Wanted:
        def read() -> Wanted:
            with self._database.read() as connection:
                pinned = policies.pinned_version(connection)
                active = policies.active_policy(connection)
                target = (
                    policies.newest_policy(connection) if pinned is None else policies.get_policy(connection, pinned)
                )
                if target is not None and target.status is PolicyStatus.FAILED:
                    target = active
                return Wanted(target, active, policies.canary_policy(connection), pinned is not None)

        return await asyncio.to_thread(read)

    async def _follow(self) -> None:
        """Bring every healthy engine to the wanted version, or the canary a step further."""
        wanted = await self._wanted()
        self._canary.show(wanted.canary)
        if not self._pool.healthy or self._is_settled(wanted):
            return
        async with self._driving() as is_driver:
            if not is_driver:
                await self._adopt(wanted)
                return
            # Somebody else may have driven while the lease was awaited.
            wanted = await self._wanted()
            self._canary.show(wanted.canary)
            await self._adopt(wanted)
            await self._step(wanted)

    def _is_settled(self, wanted: Wanted) -> bool:
        """Say whether there is nothing to do now."""
        if wanted.target is None:
            return True
        if wanted.canary is not None:
            return not wanted.is_pinned and not self._canary.is_due
        if wanted.active is None:
            return False
        return wanted.target.version == wanted.active.version and all(
            serves(engine, wanted.target) for engine in self._pool.healthy
        )

    async def _step(self, wanted: Wanted) -> None:
        target, active, canary = wanted.target, wanted.active, wanted.canary
        assert target is not None
        if canary is not None and (wanted.is_pinned or not self._settings.canary_share):
            await self._canary.call_off(canary, active)
        elif canary is not None and active is not None:
            if await self._canary.advance(canary, active):
                await self._roll_out(canary, active)
        elif active is not None and not wanted.is_pinned and self._canary.is_wanted(target, active):
            await self._canary.begin(target, active)
        else:
            await self._roll_out(target, active)

    async def _adopt(self, wanted: Wanted) -> None:
        """Learn from the engines what another process has loaded into them."""
        for engine in self._pool.healthy:
            engine.take_label(await engine.weights_label())
            if wanted.active is None or wanted.active.kind is PolicyKind.FULL:
                engine.main = engine.own
                continue
            await engine.identify()
            engine.main = engine.adapters.get(wanted.active.version, engine.main)

    async def _roll_out(self, target: PolicyVersion, active: PolicyVersion | None) -> None:
        """Bring the engines to the target, the first alone."""
        behind = [engine for engine in self._pool.healthy if not serves(engine, target)]
        is_proven = len(behind) < len(self._pool.healthy) or (active is not None and active.version == target.version)
        seconds = 0.0
        try:
            if behind:
                await self._loader.check(target, behind[0])
            if behind and not is_proven:
                scout = behind.pop(0)
                seconds = await self._loader.exchange(scout, target, active or own_model(scout))
        except (BadCheckpoint, EngineError) as error:
            if active is not None and active.version == target.version:
                raise
            await self._fail(target, error)
            return
        others = await asyncio.gather(
            *(self._loader.exchange(engine, target, None) for engine in behind), return_exceptions=True
        )
        for engine, outcome in zip(behind, others, strict=True):
            if isinstance(outcome, EngineError):
                self._loader.take_out(engine, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                seconds = max(seconds, outcome)
        await self._succeed(target, seconds)

    async def _fail(self, target: PolicyVersion, error: TurnwiseError) -> None:
        self.last_error = reason = f"version {target.version} was not taken: {error}"
        self._metrics.reloads.labels("failed").inc()
        log.error("%s; the last good version is served", reason)
        await self._write(policies.fail_policy, target.version, reason)

    async def _succeed(self, target: PolicyVersion, seconds: float) -> None:
        self._pool.let_all_in()
        self.last_error = None
        self._metrics.reloads.labels("done").inc()
        self._metrics.policy_version.set(target.version)
        self._metrics.reload_seconds.observe(seconds)
        log.info("policy version %d is served; engines paused for %.0f ms at most", target.version, seconds * 1000)
        await self._write(policies.activate_policy, target.version, seconds, utc_now())

    async def _write(self, change: Callable[..., object], *arguments: object) -> None:
        """Write what came of driving, unless somebody else drives since: this process was frozen for too long."""
        if self._token is None:
            raise LeaseLost("this process no longer drives the reload")
        await self._writer.do(leases.under_lease, LEASE, self._token, LEASE_SECONDS, change, *arguments)

    @contextlib.asynccontextmanager
    async def _driving(self) -> AsyncIterator[bool]:
        """Hold the lease for as long as the block lasts; give False while another process holds it."""
        async with self._turn:
            token = await self._writer.do(leases.acquire_lease, LEASE, self._owner, LEASE_SECONDS)
            if token is None:
                yield False
                return
            self._token = token
            renewing = asyncio.create_task(self._renew(token))
            try:
                yield True
            finally:
                renewing.cancel()
                self._token = None
                await self._writer.do(leases.release_lease, LEASE, token)

    async def _renew(self, token: int) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            with contextlib.suppress(StoreError):  # while the store is away, nobody else can take the lease either
                await self._writer.do(leases.renew_lease, LEASE, token, LEASE_SECONDS)

    async def _check_engines(self, engines: list[Engine]) -> None:
        """See which engines answer; one that comes back is brought to the active version before it gets calls."""
        outcomes = await asyncio.gather(*(self._check(engine) for engine in engines), return_exceptions=True)
        for engine, outcome in zip(engines, outcomes, strict=True):
            if isinstance(outcome, EngineError) and engine.healthy:
                self._loader.take_out(engine, outcome)
            elif isinstance(outcome, BadCheckpoint):
                self.last_error = f"the engine at {engine.url} cannot be brought up to date: {outcome}"
        for outcome in outcomes:
            if isinstance(outcome, EngineUnsuitable) or not isinstance(outcome, EngineError | BadCheckpoint | None):
                raise outcome

    async def _check(self, engine: Engine) -> None:
        await engine.ask("GET", "/health", seconds=5.0)
        if engine.healthy and await self._lost_its_weights(engine):
            self._loader.take_out(engine, "it was restarted, and has the weights that it started with")
        if not engine.healthy:
            await self._welcome(engine)
        elif engine.adapters:
            trial = self._pool.trial
            await self._loader.retire(engine, {engine.version} | ({trial.version} if trial else set()))

    async def _lost_its_weights(self, engine: Engine) -> bool:
        """Say whether an engine was restarted between two looks at it."""
        if engine.main.adapter is not None:
            await engine.identify()
            return engine.main.version not in engine.adapters
        if engine.holds == UNLABELLED or await _has_version(engine):
            return False
        async with self._driving() as is_driver:  # or else another process is exchanging them
            return is_driver and not await _has_version(engine)

    async def _welcome(self, engine: Engine) -> None:
        """Let an engine in that has just come, or come back: with fresh weights if it was restarted."""
        await engine.identify()
        engine.take_label(await engine.weights_label())
        engine.main = engine.own
        active = (await self._wanted()).active
        is_right = engine.holds is not None and (active is None or serves(engine, active))
        if not is_right or await engine.is_paused():
            async with self._driving() as is_driver:
                if not is_driver:
                    return
                await self._restore(engine, active or own_model(engine))
        async with self._learning:  # the first engine teaches the template to all, in a thread that must be alone
            await self._learn(engine)
        engine.healthy = True
        self._metrics.engine_up.labels(engine.url).set(1)
        self._metrics.policy_version.set(engine.version)
        log.info("the engine at %s serves %s, version %d", engine.url, engine.model, engine.version)

    async def _restore(self, engine: Engine, active: PolicyVersion) -> None:
        """Bring an engine to the active version whatever it holds, and let it sample: its driver may have died."""
        await self._loader.check(active, engine)
        await self._loader.load(engine, active)
        await engine.resume()


async def _has_version(engine: Engine) -> bool:
    return (await engine.weights_label() or "").isdigit()
