"""Limits of four proxies on one PostgreSQL hold over all of them, also when one is killed."""

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx2
import pytest
from support.proxies import RunningProxy
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.store import keys
from turnwise.store.database import Database

pytestmark = pytest.mark.postgres
REQUESTS, CALLS, TOKENS = 40, 6, 3000
HTTP_OK, LIMITED = 200, 429
FLAGS = [f"--key-requests-per-minute={REQUESTS}", f"--tenant-max-calls={CALLS}", f"--key-tokens-per-minute={TOKENS}"]


@pytest.fixture
def fleet(fake_engine, start_proxy, postgres_server, postgres_template):
    """Return four proxies with the same limits, and a function that makes a key of a tenant."""
    url = postgres_server.url(postgres_server.create_database(postgres_template))
    with contextlib.closing(Database(url)) as database:

        def new_key(tenant: str, **options: Any) -> str:
            with database.write() as connection:
                return keys.create_key(connection, tenant, keys.KeyRole.AGENT, "", **options)[1]

        new_key("first")  # with a key in the store, calls need one from the start
        yield [start_proxy(fake_engine.url, *FLAGS, database_url=url) for _ in range(4)], new_key


def ask(proxy: RunningProxy, key: str, said: str = "Hello.") -> httpx2.Response:
    asked = {"model": "fake", "messages": [{"role": "user", "content": said}]}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{proxy.v1}/chat/completions", json=asked, headers=headers, timeout=WAIT_SECONDS)


def use_up(proxy: RunningProxy, key: str, said: str) -> int:
    """Call until the proxy refuses a call; return the tokens of its calls."""
    used = 0
    for _ in range(REQUESTS):
        reply = ask(proxy, key, said)
        if reply.status_code == LIMITED:
            return used
        used += reply.json()["usage"]["total_tokens"]
    raise AssertionError("the proxy refused no call")


def test_the_requests_and_tokens_of_a_minute_and_a_budget_are_those_of_all_proxies(fleet):
    proxies, new_key = fleet
    key, begun = new_key("rates"), time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        rounds = itertools.islice(itertools.cycle(proxies), 2 * REQUESTS)
        replies = list(pool.map(lambda proxy: ask(proxy, key), rounds))
        refilled = (time.monotonic() - begun) * REQUESTS / 60
    # The tenant's six places are taken meanwhile, too: calls that they refuse make no request.
    while any(ask(proxy, key).status_code == HTTP_OK and replies.append(None) is None for proxy in proxies):
        refilled = (time.monotonic() - begun) * REQUESTS / 60
    served = sum(reply is None or reply.status_code == HTTP_OK for reply in replies)
    assert REQUESTS - 4 <= served <= REQUESTS + refilled + 4
    said = "word " * 60
    key = new_key("tokens")
    used = [use_up(proxy, key, said) for proxy in proxies]
    assert TOKENS <= used[0] <= sum(used) < 2 * TOKENS
    key = new_key("budgets", token_budget=TOKENS // 2)
    used = [use_up(proxy, key, said) for proxy in proxies]
    assert TOKENS // 2 <= used[0] <= sum(used) < TOKENS


def test_the_places_of_a_killed_proxy_go_to_the_others(fleet, fake_engine):
    """The engine is paused, so admitted calls run until it resumes, and all others are refused."""
    proxies, new_key = fleet
    key = new_key("places")
    httpx2.post(f"{fake_engine.url}/pause?mode=keep")
    with ThreadPoolExecutor(32) as pool:
        running = {pool.submit(ask, proxy, key): proxy for proxy in proxies for _ in range(3)}

        def take_places(those: list[RunningProxy]) -> None:
            """Call until all places are taken: one that is free at another proxy is given back within a second."""
            turns = itertools.cycle(those)

            def are_taken() -> bool:
                wait(running, 1.0)
                unanswered = sum(not call.done() for call in running)
                if unanswered < CALLS:
                    proxy = next(turns)
                    running[pool.submit(ask, proxy, key)] = proxy
                return unanswered == CALLS

            wait_until(are_taken, "all places are taken")

        take_places(proxies)
        victim = next(proxy for call, proxy in running.items() if not call.done())
        lost = [call for call, proxy in running.items() if proxy is victim and not call.done()]
        victim.kill()
        assert all(call.exception(WAIT_SECONDS) is not None for call in lost)
        others = [proxy for proxy in proxies if proxy is not victim]
        take_places(others)
        assert {ask(proxy, key).status_code for proxy in others} == {LIMITED}
        httpx2.post(f"{fake_engine.url}/resume")
        codes = [call.result(WAIT_SECONDS).status_code for call in running if call not in lost]
    assert codes.count(HTTP_OK) == CALLS
    assert set(codes) == {HTTP_OK, LIMITED}
