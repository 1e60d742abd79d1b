"""Adapters of named policies: a new version is loaded and checked before its policy's sessions sample with it.

One engine loads a version first and compares it with the trainer's logprobs; the others follow. Nothing is paused, and
a version that fails changes nothing of another policy. An engine that lacks an adapter, because it was restarted, loads
it again at the first call that needs it, which waits for that.
"""

from __future__ import annotations

import asyncio
import logging

from proxy.engines.engine import Engine, Lane
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from proxy.reload.driver_lease import DriverLease
from proxy.reload.load_attempts import LoadAttempts, record_failure
from proxy.reload.loader import Loader
from proxy.reload.served_versions import ServedVersions, Wanted
from turnwise.errors import BadCheckpoint, EngineError, FilesNotRead
from turnwise.store import policies
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, PolicyVersion

log = logging.getLogger(__name__)
MAX_EXPORTED = 100
"""Named policies whose served version is a metric, the oldest ones: each has a label of its own."""


class NamedAdapters:
    """Serves the versions of named policies."""

    def __init__(
        self,
        database: Database,
        lease: DriverLease,
        pool: EnginePool,
        loader: Loader,
        served: ServedVersions,
        metrics: Metrics,
        *,
        load_seconds: float,
    ) -> None:
        self._database = database
        self._lease = lease
        self._pool = pool
        self._loader = loader
        self._served = served
        self._metrics = metrics
        self._load_seconds = load_seconds
        self._attempts: dict[int, LoadAttempts] = {}
        """Failed attempts by policy."""
        self._loading: dict[tuple[str, int], asyncio.Task[Lane]] = {}
        """Loads that calls wait for, by engine and version."""
        self._exported: dict[int, int] = {}
        """The versions that the metric has, by policy."""
        pool.load_adapter = self.load

    async def follow(self, since: float) -> None:
        """Bring each named policy to its pinned or newest version, by a reading since this monotonic instant."""
        wanted = await self._served.wanted(since)
        self._export(wanted)
        if not self._pool.serving or not self._behind(wanted.named_targets()):
            return
        async with self._lease.held() as is_driver:
            if not is_driver:
                return
            # Another process may have driven while the lease was awaited.
            for target in self._behind((await self._served.wanted()).named_targets()):
                await self._serve(target)

    def _export(self, wanted: Wanted) -> None:
        """Set the metric of the served versions, where they have changed."""
        for policy in list(wanted.named.values())[: MAX_EXPORTED + 1]:
            state = wanted.states.get(policy.policy_id)
            version = 0 if state is None or state.active is None else state.active.version
            if policy.policy_id != DEFAULT_POLICY and self._exported.get(policy.policy_id) != version:
                self._exported[policy.policy_id] = version
                self._metrics.named_policy_version.labels(policy.tenant, policy.name).set(version)

    def _behind(self, targets: list[tuple[PolicyVersion, PolicyVersion | None]]) -> list[PolicyVersion]:
        """Return the versions that are to be served, are not, and may be loaded now."""
        return [
            target
            for target, active in targets
            if (active is None or active.version != target.version)
            and not self._attempts_of(target).is_waiting(target.version)
        ]

    def _attempts_of(self, target: PolicyVersion) -> LoadAttempts:
        return self._attempts.setdefault(target.policy_id, LoadAttempts(self._metrics))

    async def _serve(self, target: PolicyVersion) -> None:
        """Load a version into the engines, and record that it is served; one that cannot be loaded fails."""
        first, *others = self._pool.serving
        attempts = self._attempts_of(target)
        try:
            await self._loader.check(target, first)
            await self._loader.load_beside(first, target)
        except FilesNotRead:
            return  # a later round asks again; the read goes on, and is logged
        except (BadCheckpoint, EngineError) as error:
            if not attempts.schedule(target.version, error):
                await record_failure(self._lease, self._metrics, target, error)
            return
        loads = (self._loader.load_beside(engine, target) for engine in others)
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("version %d will be loaded at its first call: %s", target.version, outcome)
        attempts.forget(target.version)
        self._metrics.reloads.labels("done").inc()
        log.info("policy version %d of policy %d is served", target.version, target.policy_id)
        await self._lease.write(policies.activate_policy, target.version, 0.0)
        await self._served.refresh()

    async def load(self, engine: Engine, version: int) -> Lane:
        """Return the lane of an adapter; load it if the engine lacks it. Calls at the same time share one load.

        Raises:
            ReloadFailed: the engine did not load it.
            EngineUnavailable: it does not answer.
        """
        key = engine.url, version
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(engine, version))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    async def _load(self, engine: Engine, version: int) -> Lane:
        await engine.find_adapter(version)
        if version in engine.adapters:  # another process has loaded it
            return engine.adapters[version]

        def read() -> str:
            with self._database.read() as connection:
                return policies.get_policy(connection, version).path

        path = await asyncio.to_thread(read)
        self._metrics.adapter_loads.inc()
        return await engine.load_adapter(version, path, seconds=self._load_seconds)
