"""Adapters of named policies: a new version is loaded and checked before its policy's sessions sample with it.

One engine loads a version first and compares it with the trainer's logprobs; the others follow. Nothing is paused, and
a version that fails changes nothing of another policy. An engine that lacks an adapter, because it was restarted, loads
it again at the first call that needs it, which waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from proxy.engines.engine import Engine, Lane
from proxy.engines.pool import EnginePool
from proxy.metrics import Metrics
from proxy.reload.driver_lease import DriverLease
from proxy.reload.follower import Follower, IsServed, RollOut
from proxy.reload.loader import Loader
from proxy.reload.served_versions import ServedVersions, Wanted
from turnwise.errors import BadCheckpoint, EngineError, FilesNotRead
from turnwise.store import policies
from turnwise.store.database import Database
from turnwise.store.policies import ServingState
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
        follower_of: Callable[[int, IsServed, RollOut], Follower],
        load_seconds: float,
    ) -> None:
        self._database = database
        self._lease = lease
        self._pool = pool
        self._loader = loader
        self._served = served
        self._metrics = metrics
        self._load_seconds = load_seconds
        self._follower_of = follower_of
        self._followers: dict[int, Follower] = {}
        """What follows the store, by policy."""
        self._loading: dict[tuple[str, int], asyncio.Task[Lane]] = {}
        """Loads that calls wait for, by engine and version."""
        self._exported: dict[int, int] = {}
        """The versions that the metric has, by policy."""
        pool.load_adapter = self.load

    async def follow(self, since: float) -> None:
        """Bring each named policy to its pinned or newest version, by a reading since this monotonic instant."""
        wanted = await self._served.wanted(since)
        self._export(wanted)
        if not self._pool.serving or not self._unsettled(wanted):
            return
        async with self._lease.held() as is_driver:
            if not is_driver:
                return
            # Another process may have driven while the lease was awaited.
            for policy_id, state in self._unsettled(await self._served.wanted()):
                try:
                    await self._followers[policy_id].step(state)
                except FilesNotRead:
                    continue  # a later round asks again; the read goes on, and is logged
                except (BadCheckpoint, EngineError) as error:
                    self._metrics.background_errors.labels("reload").inc()
                    log.warning("policy %d could not be brought up to date: %s", policy_id, error)

    def _unsettled(self, wanted: Wanted) -> list[tuple[int, ServingState]]:
        """Return the named policies for which there is something to do, with their versions."""
        own = [(policy_id, state) for policy_id, state in wanted.states.items() if policy_id != DEFAULT_POLICY]
        for policy_id, _ in own:
            if policy_id not in self._followers:
                self._followers[policy_id] = self._follower_of(policy_id, _is_served, self._roll_out)
        return [(policy_id, state) for policy_id, state in own if not self._followers[policy_id].is_settled(state)]

    def _export(self, wanted: Wanted) -> None:
        """Set the metric of the served versions, where they have changed."""
        for policy in list(wanted.named.values())[: MAX_EXPORTED + 1]:
            state = wanted.states.get(policy.policy_id)
            version = 0 if state is None or state.active is None else state.active.version
            if policy.policy_id != DEFAULT_POLICY and self._exported.get(policy.policy_id) != version:
                self._exported[policy.policy_id] = version
                self._metrics.named_policy_version.labels(policy.tenant, policy.name).set(version)

    async def _roll_out(self, target: PolicyVersion, _active: PolicyVersion | None) -> float:
        """Load a version into one engine and check it, then into the others; no call waits, so that the pause is 0.

        Raises:
            BadCheckpoint, EngineError: the first engine did not load it; the others load it at its first call.
            FilesNotRead: its files are being read; call again.
        """
        first, *others = self._pool.serving
        await self._loader.check(target, first)
        await self._loader.load_beside(first, target)
        loads = (self._loader.load_beside(engine, target) for engine in others)
        for outcome in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("version %d will be loaded at its first call: %s", target.version, outcome)
        return 0.0

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


def _is_served(_target: PolicyVersion, _state: ServingState) -> bool:
    """Return that an active adapter is where calls need it: an engine that lacks it loads it at its first call."""
    return True
