"""The memory of request bodies: the share of a key, the bound of all, and who waits for whom."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from proxy.auth import Principal
from proxy.limits.bodies import Bodies
from turnwise.errors import TooLarge

LONGEST = 100


def started(bodies: Bodies, key_id: str, num_bytes: int | None = None) -> asyncio.Task[ExitStack]:
    """Begin to reserve a body; one without a declared length counts as the longest one."""
    caller = Principal(tenant="t", role="agent", key_id=key_id)
    headers = {} if num_bytes is None else {b"content-length": str(num_bytes).encode()}
    return asyncio.create_task(bodies.reserve(caller, headers))


async def granted(tasks: list[asyncio.Task[ExitStack]]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_a_key_has_two_of_the_longest_bodies_in_memory_and_delays_no_other_key():
    bodies = Bodies(LONGEST)
    own = [started(bodies, "a", 100), started(bodies, "a"), started(bodies, "a", 1)]
    other = [started(bodies, "b", 100)]
    assert await granted(own + other) == [True, True, False, True]
    (await own[0]).close()
    assert await granted(own) == [True, True, True]


async def test_all_keys_have_eight_of_the_longest_bodies_in_memory_and_the_first_goes_first():
    bodies = Bodies(LONGEST)
    first = [started(bodies, f"key {number}", 100) for number in range(8)]
    late = [started(bodies, "late", 60), started(bodies, "later", 50)]
    assert await granted(first + late) == [True] * 8 + [False] * 2
    with await first[0]:
        late[0].cancel()
    assert await granted(late) == [True, True]
    assert late[0].cancelled()


async def test_a_session_key_has_the_share_of_its_root_and_what_is_given_back_twice_counts_once():
    bodies = Bodies(LONGEST)
    child = Principal(tenant="t", role="session", key_id="s", parent_key_id="a", session_id="s")
    held = await bodies.reserve(child, {})
    own = [started(bodies, "a"), started(bodies, "a"), started(bodies, "a")]
    assert await granted(own) == [True, False, False]
    held.close()
    held.close()
    assert await granted(own) == [True, True, False]


async def test_a_body_that_is_declared_too_long_is_refused_before_it_is_read():
    with pytest.raises(TooLarge, match="101 bytes; the limit is 100"):
        await started(Bodies(LONGEST), "a", 101)
