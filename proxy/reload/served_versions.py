"""Which versions of each policy the store says are served: read, and applied to the pool in the order of the readings.

The background task reads them at an interval. During a trial each call reads them too, because a session that has left
a trial must not enter it again at a process that has not noticed the end. Calls that arrive during a reading share the
next one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Mapping

from proxy.engines.engine import Engine
from proxy.engines.pool import EnginePool
from turnwise.errors import EngineError
from turnwise.store import named_policies, policies
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, Policy, PolicyKind, PolicyStatus, PolicyVersion

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the store wants to be served, as one reading found it."""

    number: int
    """Order of the readings of this process, by their start."""
    read_at: float
    """When it started, on the monotonic clock."""
    active: PolicyVersion | None
    """The version that is served."""
    canary: PolicyVersion | None
    """The version on trial, also before its trial has started."""
    holdout: PolicyVersion | None
    """The older version that a share of the sessions stays on."""
    target: PolicyVersion | None
    """The pinned version, or the newest that has not failed."""
    is_pinned: bool
    """Whether the target is pinned."""
    states: Mapping[int, policies.ServingState]
    """The versions of all policies, by the policy's number; the fields above are those of the default policy."""
    named: Mapping[tuple[str, str], Policy]
    """All policies by tenant and name."""

    def named_targets(self) -> list[tuple[PolicyVersion, PolicyVersion | None]]:
        """Return the version that each named policy is to be served with, and its active one."""
        own = [state for policy_id, state in self.states.items() if policy_id != DEFAULT_POLICY]
        targets = [(target_of(state), state.active) for state in own]
        return [(target, active) for target, active in targets if target is not None]

    def versions_in_use(self) -> set[int]:
        """Return the versions that sessions of any policy may sample with."""
        used = [
            each for state in self.states.values() for each in (state.active, state.canary, state.holdout, state.base)
        ]
        return {policy.version for policy in used if policy is not None}


def target_of(state: policies.ServingState) -> PolicyVersion | None:
    """Return the pinned version, or the newest that has not failed."""
    target = state.pinned or state.newest
    if target is not None and target.status is PolicyStatus.FAILED:
        return state.active or state.newest
    return target


class ServedVersions:
    """Keeps the pool's trial and its adapters as the store says."""

    def __init__(self, database: Database, pool: EnginePool) -> None:
        self._database = database
        self._pool = pool
        self._numbers = itertools.count(1)
        self._applied = 0
        """Number of the newest reading that was applied."""
        self.active: PolicyVersion | None = None
        """The served version of that reading."""
        self.holdout: PolicyVersion | None = None
        """The hold-out of that reading."""
        self.in_use: set[int] = set()
        """The versions that sessions of any policy may sample with, by that reading."""
        self.ended: set[int] = set()
        """The versions that sessions of policies sampled with which were then archived or deleted."""
        self._newest: Wanted | None = None
        """That reading."""
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """A reading for calls that has not started yet."""

    async def wanted(self, since: float = math.inf) -> Wanted:
        """Read and apply what the store wants, unless a reading since this monotonic instant has done so."""
        if self._newest is not None and self._newest.read_at >= since:
            return self._newest
        wanted = await self._read()
        self._apply(wanted)
        return wanted

    async def refresh(self) -> None:
        """Read and apply the versions once; the reading starts after this call.

        Raises:
            StoreError: the store does not answer.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._read_after(self._running))
        await asyncio.shield(self._next)

    async def _read_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None and not running.done():
            await asyncio.wait({running})
        self._running, self._next = self._next, None
        wanted = await self._read()
        await self._find_adapters(wanted)
        self._apply(wanted)

    async def _read(self) -> Wanted:
        number, read_at = next(self._numbers), time.monotonic()
        states, named = await asyncio.to_thread(self._read_states)
        state = states.get(DEFAULT_POLICY, policies.ServingState())
        return Wanted(
            number=number,
            read_at=read_at,
            active=state.active,
            canary=state.canary,
            holdout=state.holdout,
            target=target_of(state),
            is_pinned=state.pinned is not None,
            states=states,
            named={(policy.tenant, policy.name): policy for policy in named},
        )

    def _read_states(self) -> tuple[dict[int, policies.ServingState], list[Policy]]:
        with self._database.read() as connection:
            return policies.serving_states(connection), named_policies.list_named_policies(connection)

    async def _find_adapters(self, wanted: Wanted) -> None:
        """Ask the engines for adapters that another process has loaded into them."""
        missing = [
            (engine, policy.version)
            for policy in (wanted.active, wanted.canary, wanted.holdout)
            if policy is not None and policy.kind is PolicyKind.LORA
            for engine in self._pool.serving
            if policy.version not in engine.adapters
        ]
        await asyncio.gather(*(_find_adapter(engine, version) for engine, version in missing))

    def _apply(self, wanted: Wanted) -> None:
        """Set the trial; let calls sample with another adapter if another version is wanted."""
        if wanted.number < self._applied:
            return
        self._applied, self._newest = wanted.number, wanted
        self._pool.trial, self._pool.holdout = _version(wanted.canary), _version(wanted.holdout)
        self.holdout = wanted.holdout
        self._pool.policies = wanted.named
        self._pool.policy_names = {policy.policy_id: policy.name for policy in wanted.named.values()}
        self._pool.archived = {each.policy_id for each in wanted.named.values() if each.archived_at is not None}
        live = self._pool.policy_names.keys() - self._pool.archived
        self.ended |= {served.version for policy_id, served in self._pool.adapters.items() if policy_id not in live}
        self._pool.adapters = {
            policy_id: served
            for policy_id, state in wanted.states.items()
            if policy_id != DEFAULT_POLICY and (served := state.active or state.base) is not None
        }
        self.in_use = wanted.versions_in_use()
        before, self.active = self.active, wanted.active
        if _version(before) != _version(wanted.active):
            for engine in self._pool.serving:
                self.choose_adapter(engine)

    def choose_adapter(self, engine: Engine) -> None:
        """Let calls on an engine sample with the served version, if that is an adapter which the engine has."""
        if self.active is not None and self.active.kind is PolicyKind.LORA:
            engine.active_lane = engine.adapters.get(self.active.version, engine.active_lane)


def _version(policy: PolicyVersion | None) -> int | None:
    return None if policy is None else policy.version


async def _find_adapter(engine: Engine, version: int) -> None:
    try:
        await engine.find_adapter(version)
    except EngineError as error:
        log.info("calls of version %d go to other engines: %s", version, error)
