from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from turnwise.rollouts.pacing import Pace

METRICS = {"num_uniform_groups": 2}


class Policies:
    """Stands for a client; it has only versions, the newest first, each of which had two groups of equal rewards."""

    def __init__(self, num_refills: int) -> None:
        self.version = 7
        self._metrics = METRICS | {"num_refill_groups": num_refills}

    async def key_policy(self) -> str:
        return "support"

    async def policies(self, policy: str) -> AsyncIterator[dict[str, object]]:
        assert policy == "support"
        for version in range(self.version, 5, -1):
            status = "active" if version == self.version else "retired"
            yield {"version": version, "status": status, "metrics": self._metrics}


@pytest.mark.parametrize(("num_refills", "expected"), [(0, 6 + 3 * 3 + 1), (2, 6 + 3 * 5 + 1)])
async def test_groups_wait_until_the_trainer_has_used_earlier_ones(num_refills: int, expected: int):
    """3 groups a version and a lead of 2: 6 groups are admitted at once, 3 more with each of 3 versions.

    7 groups with equal rewards make room for 7 others, until the versions have used 3 · 2 of them. A trainer that took
    2 others in their place used 5 groups for each version.
    """
    policies, stopping = Policies(num_refills), asyncio.Event()
    pace = Pace(policies, groups_per_version=3, lead=2.0)
    admitted = 0

    async def admit_all() -> None:
        nonlocal admitted
        while not stopping.is_set():
            await pace.admit(stopping)
            admitted += not stopping.is_set()

    async def admits(expected: int) -> bool:
        for _ in range(3000):
            if admitted >= expected:
                break
            await asyncio.sleep(0.01)
        return admitted == expected

    admitting = asyncio.create_task(admit_all())
    assert await admits(6)
    for _ in range(7):
        pace.note_uniform_group()
    assert await admits(6 + 7), "batches that teach nothing make no version"
    policies.version = 10
    assert await admits(expected)
    stopping.set()
    await admitting
    assert admitted == expected
