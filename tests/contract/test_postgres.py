"""The store on PostgreSQL, in short: a proxy captures, a reward arrives, and a claim takes what is trained.

`.ci/run` runs all of the store's tests on PostgreSQL; this one is for `make test`.
"""

from __future__ import annotations

import contextlib

import httpx2
from support.private_postgres import PrivatePostgres
from support.proxies import StartProxy, assert_served_is_stored
from turnwise_fake_engine import RunningFakeEngine

from turnwise.client import Client
from turnwise.store import claims
from turnwise.store.database import Database


def test_a_proxy_over_postgresql_captures_turns_that_a_trainer_claims_once(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy, postgres_server: PrivatePostgres, postgres_template: str
) -> None:
    url = postgres_server.url(postgres_server.create_database(postgres_template))
    proxy = start_proxy(fake_engine.url, database_url=url)
    fake_engine.calls.clear()
    with Client(proxy.url) as client:
        for run in range(2):
            session = client.create_session(session_id=f"s{run}", task_id="t", run=run, group_id="g", group_size=2)
            messages = [{"role": "user", "content": "Hello."}]
            for _ in range(2):
                asked = {"model": "fake", "messages": messages}
                reply = httpx2.post(f"{proxy.session_v1(f's{run}')}/chat/completions", json=asked).json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            session.reward(float(run))
            session.end()
    assert_served_is_stored(proxy, fake_engine)
    assert [len({view.turn.chain_id for view in proxy.turns(f"s{run}")}) for run in range(2)] == [1, 1]
    with contextlib.closing(Database(url)) as database:
        claimed = claims.claim(database, "trainer", max_groups=2, lease_seconds=60)
        assert claimed is not None
        assert [group.group_id for group in claimed.groups] == ["g"]
        assert claims.claim(database, "another", max_groups=2, lease_seconds=60) is None
