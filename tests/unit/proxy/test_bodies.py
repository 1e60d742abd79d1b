"""The memory of request bodies: what has arrived counts, each key and tenant has a share, and waiting always ends."""

import asyncio
import random
from typing import Any

import pytest

from proxy.features.limits.bodies import ALL_BODIES, KEY_BODIES, TENANT_BODIES, ArrivingBody, Bodies
from proxy.http import asgi
from proxy.http.asgi import read_body
from turnwise.errors import TooLarge, TooSlow

LONGEST = 100


async def added(body: ArrivingBody, num_bytes: int) -> asyncio.Task[None]:
    """Begin to add bytes; return the task after it had time to end."""
    task = asyncio.create_task(body.add(num_bytes))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def declared(bodies: Bodies, tenant: str = "t", key: str = "k") -> ArrivingBody:
    return bodies.open(tenant, key, {b"content-length": b"100"})


async def test_bodies_that_are_announced_and_not_sent_hold_nothing():
    """Eight of them once held all places."""
    bodies = Bodies(LONGEST)
    announced = [declared(bodies, f"hostile {number}") for number in range(1000)]
    for each in announced:
        assert (await added(each, 0)).done()
    others = [declared(bodies, f"other {number}") for number in range(7)]
    for each in others:
        assert (await added(each, 100)).done()


async def test_a_key_has_two_of_the_longest_bodies_in_memory_and_delays_no_other_key():
    bodies = Bodies(LONGEST)
    own = [declared(bodies, key="a") for _ in range(3)]
    assert [(await added(own[0], 100)).done(), (await added(own[1], 100)).done()] == [True, True]
    for each in own[:2]:
        each.end()
    waiting = await added(own[2], 1)
    assert not waiting.done()
    assert (await added(declared(bodies, key="b"), 100)).done()
    own[0].close()
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize(
    ("most", "place"),
    [
        (TENANT_BODIES, lambda number: ("t", f"key {number}")),
        (ALL_BODIES, lambda number: (f"tenant {number}", f"key {number}")),
    ],
    ids=["tenant", "all"],
)
async def test_a_tenant_and_all_together_have_their_share(most, place):
    bodies = Bodies(LONGEST)
    whole = [declared(bodies, *place(number)) for number in range(most)]
    for each in whole:
        assert (await added(each, 100)).done()
        each.end()
    late = declared(bodies, *place(most))
    waiting = await added(late, 60)
    assert not waiting.done()
    with whole[0]:
        pass
    await asyncio.wait_for(waiting, 60)


async def test_a_session_key_has_the_share_of_its_root_and_what_is_given_back_twice_counts_once():
    bodies = Bodies(LONGEST)
    held = [declared(bodies, key="root") for _ in range(KEY_BODIES)]
    for each in held:
        await each.add(100)
        each.end()
    next_ones = [declared(bodies, key="root") for _ in range(2)]
    held[0].close()
    held[0].close()
    assert [(await added(each, 100)).done() for each in next_ones] == [True, False]


@pytest.mark.parametrize("seed", range(8))
async def test_bodies_that_arrive_together_all_become_whole_and_never_hold_more_than_their_share(seed):
    """Each waits for others while it holds a part itself."""
    bodies, chosen = Bodies(LONGEST), random.Random(seed)
    held: dict[str, int] = {"all": 0}

    async def send(tenant: str, key: str) -> None:
        with declared(bodies, tenant, key) as body:
            names, rest = ("all", f"t{tenant}", f"k{tenant}{key}"), chosen.randint(1, 100)
            while rest:
                part = min(rest, chosen.randint(1, 40))
                await body.add(part)
                for name in names:
                    held[name] = held.get(name, 0) + part
                most = (ALL_BODIES, TENANT_BODIES, KEY_BODIES)
                assert all(held[name] <= number * LONGEST for name, number in zip(names, most, strict=True))
                rest -= part
                await asyncio.sleep(0)
            body.end()
            await asyncio.sleep(0)
            for name in names:
                held[name] -= body.num_bytes

    sent = [send(str(chosen.randrange(5)), str(chosen.randrange(3))) for _ in range(200)]
    await asyncio.wait_for(asyncio.gather(*sent), 120)
    assert set(held.values()) == {0}


async def test_a_body_that_is_declared_too_long_is_refused_before_it_is_read():
    with pytest.raises(TooLarge, match="101 bytes; the limit is 100"):
        Bodies(LONGEST).open("t", "k", {b"content-length": b"101"})


class Sending:
    """A client that sends parts and then nothing."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)

    async def receive(self) -> Any:
        if not self._parts:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._parts.pop(0), "more_body": True}


@pytest.mark.parametrize("parts", [[b"x"], [b"x"] * 5, [b"x" * 50_000]], ids=["one byte", "drops", "much"])
async def test_a_body_that_has_begun_and_stops_is_refused(monkeypatch, parts):
    """Without limit of its own time, which the connection has."""
    monkeypatch.setattr(asgi, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(TooSlow, match="1024 bytes a second"):
        await asyncio.wait_for(read_body(Sending(*parts).receive, max_bytes=10**6), 60)


async def test_the_time_in_which_the_proxy_does_not_read_is_not_the_clients(monkeypatch):
    """It waits for memory for longer than the client may be silent."""
    monkeypatch.setattr(asgi, "PATIENCE_SECONDS", 30.0)
    clock = [0.0]
    monkeypatch.setattr(asgi.time, "monotonic", lambda: clock[0])
    bodies, sent = Bodies(LONGEST), []

    class Slow(ArrivingBody):
        async def add(self, num_bytes: int) -> None:
            clock[0] += 1000.0
            sent.append(num_bytes)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"x", "more_body": len(sent) < 3}

    memory = bodies.open("t", "k", {})
    memory.__class__ = Slow
    assert await read_body(receive, max_bytes=10, memory=memory) == b"xxxx"
