"""Which versions of each policy the store says are served: read, and applied to the pool, one reading after the other.

The background task reads them at an interval. During a trial each call reads them too, because a session that has left
a trial must not enter it again at a process that has not noticed the end. Calls that arrive during a reading share the
next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from proxy.engines.pool import EnginePool
from turnwise.store import named_policies, policies
from turnwise.store.database import Connection, Database
from turnwise.store.policies import NO_VERSIONS, ServingState
from turnwise.types import Policy


def versions_in_use(states: Iterable[ServingState]) -> set[int]:
    """Return the versions that sessions of these policies may sample with."""
    used = [each for state in states for each in (state.active, state.canary, state.holdout, state.base)]
    return {policy.version for policy in used if policy is not None}


class ServedVersions:
    """Keeps what the pool knows of the policies' versions as the store says."""

    def __init__(self, database: Database, pool: EnginePool) -> None:
        self._database = database
        self._pool = pool
        self.read_at = 0.0
        """When the newest reading that was applied started, on the monotonic clock."""
        self.in_use: set[int] = set()
        """The versions that sessions of any policy may sample with, by that reading."""
        self.ended: set[int] = set()
        """The versions that sessions of policies sampled with which were then archived or deleted."""
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None
        """A reading that has not started yet."""

    def state(self, policy_id: int) -> ServingState:
        """Return the versions of a policy, as the newest reading found them."""
        return self._pool.served.get(policy_id, NO_VERSIONS)

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
        read_at = time.monotonic()
        states, named = await self._database.fetch(_read)
        pool = self._pool
        pool.policies = {(policy.tenant, policy.name): policy for policy in named}
        pool.policy_names = {policy.policy_id: policy.name for policy in named}
        pool.archived = {each.policy_id for each in named if each.archived_at is not None}
        live = pool.policy_names.keys() - pool.archived
        self.ended |= versions_in_use(state for number, state in pool.served.items() if number not in live)
        pool.served = states
        self.in_use = versions_in_use(states.values())
        self.read_at = read_at


def _read(connection: Connection) -> tuple[dict[int, ServingState], list[Policy]]:
    return policies.serving_states(connection), named_policies.list_named_policies(connection)
