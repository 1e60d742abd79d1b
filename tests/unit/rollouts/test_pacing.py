from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from turnwise.rollouts.pacing import Pace


class Policies:
    """Stands for a client; it has only the active version."""

    def __init__(self) -> None:
        self.version = 7

    async def policies(self) -> AsyncIterator[dict[str, object]]:
        yield {"version": self.version - 1, "status": "retired"}
        yield {"version": self.version, "status": "active"}


async def test_groups_wait_until_the_trainer_has_used_earlier_ones():
    """3 groups a version and a lead of 2: 6 groups are admitted at once, and 3 more with each version.

    Two of them have equal rewards, and two more take their place.
    """
    policies, stopping = Policies(), asyncio.Event()
    pace = Pace(policies, groups_per_version=3, lead=2.0)
    admitted = 0

    async def admit_all() -> None:
        nonlocal admitted
        while not stopping.is_set():
            await pace.admit(stopping)
            admitted += not stopping.is_set()

    admitting = asyncio.create_task(admit_all())
    for version, expected in ((7, 6), (8, 9), (10, 15)):
        policies.version = version
        for _ in range(3000):
            if admitted >= expected:
                break
            await asyncio.sleep(0.01)
    for _ in range(2):
        pace.refill()
    for _ in range(3000):
        if admitted >= 17:
            break
        await asyncio.sleep(0.01)
    stopping.set()
    await admitting
    assert (admitted, pace.num_refills) == (17, 2)
