"""Delays training groups until the trainer has used earlier ones, so that sessions stay fresh."""

from __future__ import annotations

import asyncio
import time

from turnwise.client import AsyncClient
from turnwise.types import DEFAULT_POLICY_NAME, Json

POLL_SECONDS = 0.25


class Pace:
    """Admits groups for at most `lead` versions more than the trainer has published.

    A group of equal rewards makes room for another one, because the trainer may learn nothing from it, until a version
    counts it as a part of its batch. So batches that teach nothing, from which no version comes, stop no rollouts.
    """

    def __init__(self, client: AsyncClient, *, groups_per_version: int, lead: float) -> None:
        self._client = client
        self._groups_per_version = groups_per_version
        self._lead = lead
        self._num_groups = 0
        self._num_uniform = 0
        """Groups of equal rewards that were played and are in no version's batch."""
        self._num_used = 0
        self._policy = DEFAULT_POLICY_NAME
        self._version: int | None = None
        self._polled_at = float("-inf")

    async def admit(self, stopping: asyncio.Event) -> None:
        """Wait until one more group may start, or until the runner stops."""
        if self._version is None:
            await self._poll()
        while not stopping.is_set():
            if self._num_groups < (self._num_used + self._lead * self._groups_per_version + max(0, self._num_uniform)):
                self._num_groups += 1
                return
            await self._poll()

    def note_uniform_group(self) -> None:
        self._num_uniform += 1

    async def _poll(self) -> None:
        await asyncio.sleep(max(0.0, self._polled_at + POLL_SECONDS - time.monotonic()))
        self._polled_at = time.monotonic()
        if self._version is None:
            self._policy = await self._client.key_policy()
        active = await active_policy(self._client, self._policy)
        if self._version is None:
            self._version = 0 if active is None else int(active["version"])
        if active is None or active["version"] <= self._version:
            return
        async for policy in self._client.policies(self._policy):
            if policy["version"] <= self._version:
                break
            if policy["version"] <= active["version"]:
                metrics = policy["metrics"] or {}
                self._num_used += self._groups_per_version + int(metrics.get("num_refill_groups", 0))
                self._num_uniform -= int(metrics.get("num_uniform_groups", 0))
        self._version = int(active["version"])


async def active_policy(client: AsyncClient, policy: str = DEFAULT_POLICY_NAME) -> Json | None:
    """Return a policy's active version as the API returns it; None while none was published."""
    async for version in client.policies(policy):
        if version["status"] == "active":
            return version
    return None
