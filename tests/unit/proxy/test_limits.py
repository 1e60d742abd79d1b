"""Limits per key and per tenant, and the queue in front of them."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from support.migrated import new_database
from support.waiting import WAIT_SECONDS

from proxy.auth import Principal
from proxy.calls.capture import Running
from proxy.features import Settings
from proxy.features.limits.calls import Bucket, Limits
from proxy.features.limits.shared import LEASE_SECONDS, RENEW_SECONDS, ROUND_SECONDS, SharedScope
from proxy.metrics import Metrics
from proxy.routes.calls import admit
from turnwise.errors import Overloaded
from turnwise.features.limits import Need, Rule, Share, fair_part, settle
from turnwise.store.database import Database


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


@pytest.mark.parametrize(("most", "needs", "part"), [(1, [1, 1, 1, 1], 1), (2, [1, 1, 1], 1), (7, [2, 2, 2, 2], 2)])
def test_the_parts_of_processes_that_need_the_same_use_all_of_a_limit(most, needs, part):
    assert fair_part(most, needs[0], needs[1:]) == part


@pytest.fixture
def database(tmp_path):
    with contextlib.closing(new_database(tmp_path / "limits.db")) as database:
        yield database


class Sharer:
    """What one process has of a limit of one key, with a call that always waits for a place."""

    def __init__(self, database: Database, holder: str, rule: Rule) -> None:
        self._database, self._holder = database, holder
        self.scope = SharedScope("key 'a'", "t", "a", rule, 0.0)

    def exchange(self, now: float) -> None:
        if (need := self.scope.need(now)) is not None:
            self.scope.reported(need)
            with self._database.write() as connection:
                [share] = settle(connection, self._holder, LEASE_SECONDS, [need])
            self.scope.take(need, share, now, now)

    def enters(self, now: float) -> bool:
        if self.scope.blocked_seconds(now):
            return False
        self.scope.enter()
        return True


def test_processes_whose_calls_always_wait_for_the_one_place_have_it_in_turn(database):
    sharers = [Sharer(database, holder, Rule(max_calls=1)) for holder in "abc"]
    for sharer in sharers:
        sharer.scope.num_waiting = 1
    served, running = [], None
    for round_number in range(40):
        now = round_number * ROUND_SECONDS
        for sharer in sharers:
            if sharer is running:  # its call ends, and the next one of its queue tries to come in
                sharer.scope.leave(0)
                running = None
            sharer.exchange(now)
            if sharer.enters(now):
                assert running is None
                running = sharer
                served.append(sharer)
    assert min(served.count(sharer) for sharer in sharers) >= len(served) // 4 > 0


def test_a_place_that_is_free_at_one_process_is_anothers_within_the_time_of_a_renewal(database):
    rich, poor = [Sharer(database, holder, Rule(max_calls=1)) for holder in "ab"]
    rich.scope.num_waiting = 1
    rich.exchange(0.0)
    rich.scope.num_waiting = 0
    assert rich.enters(0.0)
    rich.scope.leave(0)
    poor.scope.num_waiting = 1
    seconds = [(1 + number) * ROUND_SECONDS for number in range(round(RENEW_SECONDS / ROUND_SECONDS) + 2)]
    for now in seconds:
        rich.exchange(now)
        poor.exchange(now)
    assert poor.enters(seconds[-1])


def test_a_share_of_tokens_ends_where_the_store_is_away_and_a_failed_report_is_not_forgotten():
    scope = SharedScope("key 'a'", "t", "a", Rule(tokens_per_minute=60), 0.0)
    need = Need("t", "a", Rule(tokens_per_minute=60))
    scope.take(need, Share(0, 0, 0, 0.0, 60.0), 0.0, 0.0)
    assert scope.blocked_seconds(LEASE_SECONDS - 1) == 0
    assert scope.blocked_seconds(LEASE_SECONDS) > 60
    scope.enter()
    scope.leave(9)
    scope.end()
    last = scope.need(1.0)
    assert last is not None
    assert (last.num_tokens, last.is_idle) == (9, True)
    scope.reported(last)
    scope.failed(last)
    assert not scope.is_idle(2.0)


def test_a_minute_is_refilled_after_the_databases_clock_was_set_back(database, monkeypatch):
    times = iter([3_600_000_000, 60_000_000, 120_000_000])
    monkeypatch.setattr("turnwise.features.limits.clock", lambda _: next(times))
    granted = []
    for _ in range(3):
        with database.write() as connection:
            need = Need("t", "a", Rule(requests_per_minute=8), num_requests=8)
            granted += [share.num_requests for share in settle(connection, "p", LEASE_SECONDS, [need])]
    assert granted == [8, 0, 8]


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
    with pytest.raises(Overloaded, match="the tenant 'x' is at its limit `tenant_max_calls`; retry after 1 s"):
        await limits.admit(caller("c", "x"))
    await limits.admit(caller("c", "y"))


async def test_requests_and_tokens_per_minute_are_limited_and_the_error_has_the_time_to_retry():
    limits = make_limits(key_requests_per_minute=2)
    for _ in range(2):
        limits.leave(await limits.admit(caller("a")), 0)
    with pytest.raises(Overloaded, match="`key_requests_per_minute`") as caught:
        await limits.admit(caller("a"))
    assert caught.value.retry_after_seconds == 30
    limits = make_limits(key_tokens_per_minute=60)
    place = await limits.admit(caller("a"))
    limits.leave(place, 90)
    with pytest.raises(Overloaded, match="`key_tokens_per_minute`") as caught:
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
