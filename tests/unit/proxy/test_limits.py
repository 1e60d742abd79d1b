"""Limits per key and per tenant, and the queue in front of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import WAIT_SECONDS

from proxy.auth import Principal
from proxy.calls.capture import Running
from proxy.features import Settings
from proxy.features.limits.calls import Bucket, Limits
from proxy.metrics import Metrics
from proxy.routes.calls import admit
from turnwise.errors import Overloaded
from turnwise.features.limits import fair_part


def make_limits(**settings: Any) -> Limits:
    given = Settings(**settings)
    return Limits(given, given.max_concurrent_calls, Metrics())


def caller(key_id: str, tenant: str = "default") -> Principal:
    return Principal(tenant=tenant, role="agent", key_id=key_id, root_key_id=key_id)


def test_a_bucket_refills_within_a_minute_and_repays_its_debt_first():
    """60 a minute is one a second: after 70 are taken the balance is -10, and the next one is available after 11 s."""
    bucket = Bucket(60, 0.0)
    assert bucket.blocked_seconds(1, 0.0) == 0
    bucket.take(70)
    assert bucket.blocked_seconds(1, 0.0) == 11
    assert bucket.blocked_seconds(1, 10.0) == 1
    assert bucket.blocked_seconds(60, 1000.0) == 0


def test_a_call_is_counted_only_where_there_is_a_limit():
    assert not make_limits().are_set
    assert make_limits(tenant_tokens_per_minute=1).are_set


async def test_a_call_over_the_limit_of_the_proxy_is_refused_with_the_time_to_retry():
    metrics = Metrics()
    services: Any = SimpleNamespace(num_calls=7, max_calls=7, metrics=metrics)
    with pytest.raises(Overloaded, match=r"^the proxy is at its limit; retry after 1 s$") as refused:
        await admit(services, Running())
    assert refused.value.retry_after_seconds == 1
    assert b'\nturnwise_limited_total{limit="proxy"} 1.0\n' in metrics.render()


@pytest.mark.parametrize(
    ("own", "others", "part"),
    [
        (0, [], 1),  # of 8 that nobody needs: an eighth
        (2, [3], 3),  # of 3 that nobody needs: an eighth, rounded up
        (9, [1], 7),  # the other needs 1 of 8
        (9, [9, 9], 3),  # a third of 8, rounded up: the last one gets what is left
        (1, [9, 9], 1),
        (0, [9, 9], 0),
    ],
)
def test_a_process_gets_what_it_needs_or_as_much_of_a_limit_as_others_that_need_more(own, others, part):
    assert fair_part(8, own, others) == part


async def test_one_key_at_its_limit_does_not_stop_another():
    limits = make_limits(key_max_calls=1)
    admission = await limits.admit(caller("a"))
    with pytest.raises(Overloaded, match="key 'a'"):
        await limits.admit(caller("a"))
    await limits.admit(caller("b"))
    limits.leave(admission, 0)
    await limits.admit(caller("a"))


async def test_keys_that_call_no_more_are_forgotten_where_there_are_many(monkeypatch):
    monkeypatch.setattr("proxy.features.limits.calls.MAX_SCOPES", 2)
    limits = make_limits(key_max_calls=1)
    await limits.admit(caller("busy"))
    for number in range(9):
        limits.leave(await limits.admit(caller(f"k{number}")), 0)
    assert len(limits.scopes) <= 3
    with pytest.raises(Overloaded, match="key 'busy'"):
        await limits.admit(caller("busy"))


async def test_a_session_key_counts_as_the_key_that_made_it():
    limits = make_limits(key_max_calls=2)
    for session_id in ("s1", "s2"):
        child = Principal(tenant="t", role="session", key_id=session_id, root_key_id="a", session_id=session_id)
        await limits.admit(child)
    with pytest.raises(Overloaded, match="key 'a'"):
        await limits.admit(caller("a"))


async def test_a_tenants_limit_counts_all_of_its_keys():
    limits = make_limits(tenant_max_calls=2)
    for key_id in ("a", "b"):
        await limits.admit(caller(key_id, "x"))
    with pytest.raises(Overloaded, match="tenant 'x'"):
        await limits.admit(caller("c", "x"))
    await limits.admit(caller("c", "y"))


async def test_requests_and_tokens_per_minute_are_limited_and_the_error_has_the_time_to_retry():
    limits = make_limits(key_requests_per_minute=2)
    for _ in range(2):
        limits.leave(await limits.admit(caller("a")), 0)
    with pytest.raises(Overloaded) as caught:
        await limits.admit(caller("a"))
    assert caught.value.retry_after_seconds == 30
    limits = make_limits(key_tokens_per_minute=60)
    place = await limits.admit(caller("a"))
    limits.leave(place, 90)
    with pytest.raises(Overloaded) as caught:
        await limits.admit(caller("a"))
    assert caught.value.retry_after_seconds == 30


async def test_the_queue_is_fair_between_keys_for_any_number_of_calls():
    """One slot; `greedy` queues three calls before `modest` queues one, which is served second."""
    limits = make_limits(max_concurrent_calls=1, queue_seconds=WAIT_SECONDS)
    admission = await limits.admit(caller("first"))
    served: list[str] = []

    async def call(key_id: str) -> None:
        place = await limits.admit(caller(key_id))
        served.append(key_id)
        await asyncio.sleep(0)
        limits.leave(place, 0)

    waiting = [asyncio.ensure_future(call("greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting.append(asyncio.ensure_future(call("modest")))
    await asyncio.sleep(0)
    limits.leave(admission, 0)
    await asyncio.wait_for(asyncio.gather(*waiting), WAIT_SECONDS)
    assert served == ["greedy", "modest", "greedy", "greedy"]
    assert limits._everybody.num_calls == 0


async def test_a_call_that_times_out_or_whose_client_disconnects_leaves_the_queue():
    limits = make_limits(max_concurrent_calls=1, queue_seconds=0.05)
    admission = await limits.admit(caller("a"))
    with pytest.raises(Overloaded, match=r"after 0\.05 s in the queue"):
        await limits.admit(caller("b"))
    limits._queue_seconds = WAIT_SECONDS
    left = asyncio.ensure_future(limits.admit(caller("c")))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert not limits._queues
    limits.leave(admission, 0)
    await asyncio.wait_for(limits.admit(caller("d")), WAIT_SECONDS)


async def test_a_call_that_waits_for_its_rate_limit_is_admitted_when_the_bucket_has_refilled():
    limits = make_limits(key_requests_per_minute=1200, queue_seconds=WAIT_SECONDS)
    async with asyncio.timeout(WAIT_SECONDS):
        for _ in range(1210):  # ten more than the bucket holds
            limits.leave(await limits.admit(caller("a")), 0)


def test_each_worker_gets_its_share_of_the_limits_rounded_up():
    shared = Settings(workers=3, max_concurrent_calls=100, key_max_calls=2, cache_bytes=9, queue_seconds=1.0)
    share = shared.divided()
    assert (share.max_concurrent_calls, share.key_max_calls, share.cache_bytes) == (34, 1, 3)
    assert share.tenant_max_calls is None
    assert share.queue_seconds == 1.0
