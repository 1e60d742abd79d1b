"""Delays training groups until the trainer has used earlier ones, so that sessions stay fresh."""

from __future__ import annotations

import asyncio
import time

from turnwise.client import AsyncClient
from turnwise.types import Json

POLL_SECONDS = 0.25
"""Interval between requests for the active policy version."""


class Pace:
    """Admits groups for at most `lead` versions more than the trainer has published."""

    def __init__(self, client: AsyncClient, *, groups_per_version: int, lead: float) -> None:
        self._client = client
        self._groups_per_version = groups_per_version
        self._lead = lead
        self._num_groups = 0
        self.num_refills = 0
        """Groups that were admitted in the place of groups whose rewards are all equal."""
        self._first_version: int | None = None
        self._polled_at = float("-inf")
        self.version = 0
        """The active policy version at the last request; 0 while none was published."""

    async def admit(self, stopping: asyncio.Event) -> None:
        """Wait until one more group may start, or until the runner stops."""
        if self._first_version is None:
            await self._poll()
        while not stopping.is_set():
            if self._num_groups < self._limit():
                self._num_groups += 1
                return
            await self._poll()

    def refill(self) -> None:
        """Admit one more group, in the place of one whose rewards are all equal: the trainer does not use that one."""
        self._num_groups -= 1
        self.num_refills += 1

    def _limit(self) -> float:
        used = 0 if self._first_version is None else self.version - self._first_version
        return (used + self._lead) * self._groups_per_version

    async def _poll(self) -> None:
        await asyncio.sleep(max(0.0, self._polled_at + POLL_SECONDS - time.monotonic()))
        self._polled_at = time.monotonic()
        active = await active_policy(self._client)
        self.version = 0 if active is None else int(active["version"])
        if self._first_version is None:
            self._first_version = self.version


async def active_policy(client: AsyncClient) -> Json | None:
    """Return the active policy version as the API returns it; None while none was published."""
    async for policy in client.policies():
        if policy["status"] == "active":
            return policy
    return None
