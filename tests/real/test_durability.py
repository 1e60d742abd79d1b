"""A store that fails under load: clear errors, no lost turns, and the same process continues once the store is back."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest
from support.private_postgres import PrivatePostgres, binary
from support.proxies import RunningProxy, running_proxy
from support.retrying_agents import assert_nothing_is_lost_or_doubled, playing, wait_for
from support.waiting import wait_until
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.store import rewards, sessions
from turnwise.store.database import Database
from turnwise.store.turns import append_turns
from turnwise.types import Reward, Session, Turn

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
DEADLINE_SECONDS = 60.0
NUM_LARGE_TURNS = 8
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
    reply = httpx2.post(f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=DEADLINE_SECONDS)
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
            wait_for(agents, 32)
            postgres.stop()
            assert "database" in refused(proxy)
            assert httpx2.get(f"{proxy.url}/readyz").status_code == 503
            assert httpx2.get(f"{proxy.url}/healthz").status_code == 200
            postgres.start()
            wait_for(agents, 32)
        agents.stop()
        assert agents.refusals <= {(503, "store_unavailable")}
        assert httpx2.get(f"{proxy.url}/readyz").status_code == 200
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


@contextlib.contextmanager
def full_disk(_: RunningProxy, database: Path) -> Iterator[None]:
    filler = database.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("mounting needs root; the limit on file sizes is tested all the same")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("how", [file_limit, full_disk])
def test_no_turn_is_lost_while_the_disk_is_full_and_calls_succeed_once_there_is_space(how, tmp_path, request):
    place = request.getfixturevalue("small_disk") if how is full_disk else tmp_path / "database"
    place.mkdir(exist_ok=True)
    database = place / "turnwise.db"
    with (
        running_fake_engine(Script(pace_seconds=0.002)) as engine,
        running_proxy(engine.url, f"sqlite:///{database}", tmp_path, *IMPATIENT) as proxy,
        playing(proxy.url, 8) as agents,
    ):
        agents.go()
        wait_for(agents, 16)
        with how(proxy, database):
            wait_until(lambda: (503, "store_unavailable") in agents.refusals, "a call is refused")
            assert "space" in refused(proxy)
        wait_for(agents, 16)
        agents.stop()
        assert agents.refusals == {(503, "store_unavailable")}
        assert_nothing_is_lost_or_doubled(agents, proxy, engine)


def store_large_session(url: str) -> None:
    """Store a session whose experiences are some 20 MB of JSON, more than the sockets between hold."""
    database = Database(url)
    ids = np.full(100_000, 123_456, np.int32)
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id="large"))
        turns = [
            Turn(
                turn_id=f"t{number}",
                session_id="large",
                chain_id=f"t{number}",
                token_ids=ids,
                logprobs=np.full(len(ids), -1.2345, np.float32),
                prompt_delta=ids[:1],
                prompt_length=1,
                finish_reason="stop",
            )
            for number in range(NUM_LARGE_TURNS)
        ]
        append_turns(connection, turns)
        rewards.add_rewards(connection, [Reward(session_id="large", value=1.0)])
        sessions.end_session(connection, "default", "large")
    database.close()


def test_exports_that_nobody_reads_do_not_delay_calls(start_proxy, fake_engine):
    """An export over the limit is refused, calls are served, and closed exports make room for new ones."""
    proxy = start_proxy(fake_engine.url)
    store_large_session(proxy.database_url)
    export = f"{proxy.url}/v1/experiences"
    with contextlib.ExitStack() as stalled:
        for _ in range(4):
            peer = stalled.enter_context(socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2]))))
            peer.sendall(b"GET /v1/experiences HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert peer.recv(100).startswith(b"HTTP/1.1 200")
        reply = httpx2.get(export, timeout=DEADLINE_SECONDS)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "overloaded")
        assert "retry-after" in reply.headers
        assert httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT).status_code == 200
        assert httpx2.get(f"{proxy.v1}/sessions").status_code == 200
    wait_until(lambda: httpx2.get(export, timeout=DEADLINE_SECONDS).status_code == 200, "exports are served again")
    assert len(httpx2.get(export, timeout=DEADLINE_SECONDS).content.splitlines()) == NUM_LARGE_TURNS
