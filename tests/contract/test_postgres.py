"""The store on PostgreSQL, in short: a proxy captures, a reward arrives, and a claim takes what is trained.

`.ci/run` runs all of the store's tests on PostgreSQL; this one is for `make test`.
"""

import contextlib
import random

import httpx2
import pytest
from support.proxies import assert_served_is_stored

from turnwise.client import Client
from turnwise.store import claims, keys
from turnwise.store.database import Database


def test_a_proxy_over_postgresql_captures_turns_that_a_trainer_claims_once(
    fake_engine, start_proxy, postgres_server, postgres_template
):
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
        assert [group.group_id for group in claimed.groups] == ["g"]
        assert claims.claim(database, "another", max_groups=2, lease_seconds=60) is None


@pytest.mark.postgres
def test_a_call_for_an_end_user_with_a_long_name_is_served(
    fake_engine, start_proxy, postgres_server, postgres_template
):
    """An index of PostgreSQL has no room for 3,000 bytes that cannot be compressed."""
    proxy = start_proxy(
        fake_engine.url, database_url=postgres_server.url(postgres_server.create_database(postgres_template))
    )
    user = "".join(map(chr, random.Random(0).sample(range(0x4E00, 0x9FFF), 1000)))
    asked = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}], "user": user}
    reply = httpx2.post(f"{proxy.url}/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    (session,) = proxy.sessions()
    assert session.user_id is not None
    assert user.startswith(session.user_id)


@pytest.mark.postgres
def test_metrics_are_served_to_a_known_key_while_the_database_is_away(
    fake_engine, start_proxy, postgres_server, postgres_template
):
    """A monitor that gets nothing then cannot say what fails; whoever has no such key gets nothing."""
    url = postgres_server.url(postgres_server.create_database(postgres_template))
    with contextlib.closing(Database(url)) as database, database.write() as connection:
        _, agent = keys.create_key(connection, "team-a", "agent", "monitor")
        _, unseen = keys.create_key(connection, "default", "admin", "unseen")
    proxy = start_proxy(fake_engine.url, database_url=url)

    def scrape(key: str) -> httpx2.Response:
        return httpx2.get(f"{proxy.url}/metrics", headers={"authorization": f"Bearer {key}"})

    assert scrape(agent).status_code == 200
    postgres_server.stop()
    try:
        refused = httpx2.get(f"{proxy.url}/v1/models", headers={"authorization": f"Bearer {unseen}"})
        assert refused.status_code == 503
        scraped = scrape(agent)
        assert (scraped.status_code, scrape(unseen).status_code) == (200, 503)
        assert 'turnwise_refused_total{code="store_unavailable"}' in scraped.text
    finally:
        postgres_server.start()
    assert scrape(unseen).status_code == 200
