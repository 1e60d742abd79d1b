"""A store that fails under load: clear errors, no lost turns, and the same process continues once the store is back."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from chaos.agents import playing
from chaos.invariants import assert_nothing_is_lost_or_doubled
from support.full_disk import filled, small_disk
from support.private_postgres import PrivatePostgres, binary
from support.proxies import RunningProxy, running_proxy
from support.waiting import wait_until
from turnwise_fake_engine import Script, running_fake_engine

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
IMPATIENT = ("--commit-timeout-seconds", "1")


@pytest.fixture
def postgres() -> Iterator[PrivatePostgres]:
    if binary("postgres") is None:
        pytest.skip("install PostgreSQL's server (initdb and postgres) to run this")
    server = PrivatePostgres()
    server.start()
    yield server
    server.close()


def refused(proxy: RunningProxy) -> str:
    reply = httpx2.post(f"{proxy.url}/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
    assert int(reply.headers["retry-after"]) >= 1
    return reply.json()["error"]["message"]


@pytest.mark.postgres
def test_no_turn_is_lost_when_postgresql_is_stopped_under_load_and_started_again(postgres, tmp_path):
    url = postgres.url(postgres.create_database())
    with (
        running_fake_engine(Script(pace_seconds=0.002)) as engine,
        running_proxy(engine.url, url, tmp_path, *IMPATIENT) as proxy,
        playing(proxy.url, 16) as agents,
    ):
        agents.go()
        for _ in range(2):
            agents.wait_for(32)
            postgres.stop()
            assert "database" in refused(proxy)
            assert httpx2.get(f"{proxy.url}/readyz").status_code == 503
            assert httpx2.get(f"{proxy.url}/healthz").status_code == 200
            postgres.start()
            agents.wait_for(32)
        agents.finish()
        assert set(agents.observed.refusals) <= {(503, "store_unavailable"), (200, "store_unavailable")}
        wait_until(lambda: httpx2.get(f"{proxy.url}/readyz").status_code == 200, "the proxy is ready again")
        assert_nothing_is_lost_or_doubled(agents, proxy, engine)


@contextlib.contextmanager
def file_limit(proxy: RunningProxy, database: Path) -> Iterator[None]:
    """Prevent every file of the proxy and of its writing process from growing."""
    processes = (proxy.process.pid, proxy.writing_process())
    _, hard = resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE)
    size = max(path.stat().st_size for path in database.parent.iterdir())
    for pid in processes:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 4096, hard))
    yield
    for pid in processes:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def full_disk(_: RunningProxy, database: Path) -> contextlib.AbstractContextManager[None]:
    return filled(database.parent)


@pytest.mark.parametrize("how", [file_limit, full_disk])
def test_no_turn_is_lost_while_the_disk_is_full_and_calls_succeed_once_there_is_space(how, tmp_path):
    place = tmp_path / "database"
    database = place / "turnwise.db"
    with (
        small_disk(place) if how is full_disk else contextlib.nullcontext(place.mkdir()),
        running_fake_engine(Script(pace_seconds=0.002)) as engine,
        running_proxy(engine.url, f"sqlite:///{database}", tmp_path, *IMPATIENT) as proxy,
        playing(proxy.url, 8) as agents,
    ):
        agents.go()
        agents.wait_for(16)
        with how(proxy, database):
            wait_until(lambda: (503, "store_unavailable") in agents.observed.refusals, "a call is refused")
            assert "space" in refused(proxy)
        agents.wait_for(16)
        agents.finish()
        assert set(agents.observed.refusals) <= {(503, "store_unavailable"), (200, "store_unavailable")}
        assert_nothing_is_lost_or_doubled(agents, proxy, engine)
