"""`kill -9` of the proxy or of its writing process: each reply that a client received completely is stored once.

The proxy is killed at every named point of a call and at random moments. Its writing process must end by itself before
the next proxy starts, so that it stores nothing more for the killed proxy.
"""

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.agents import Crowd, playing
from chaos.invariants import assert_nothing_is_lost_or_doubled
from support.control_plane import metric, publish
from support.ports import free_port
from support.proxies import RunningProxy, running_proxy, wait_until_gone
from support.tiny_checkpoints import write_weights
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

from proxy.fault import POINTS

WRITERS = 2
"""Number of writing processes that are killed under one proxy."""
KILLED_AT = [point for point in POINTS if point != "weights_received"]
"""The points that this engine and this trainer reach; `tests/real/proxy/test_weight_transfer.py` has the other one."""
REPETITIONS = [1, pytest.param(20, marks=pytest.mark.slow)]
STORING = ("before_commit", "in_transaction", "after_commit_before_reply")
"""The points whose result depends on the database."""


@pytest.fixture
def slow_engine() -> Iterator[RunningFakeEngine]:
    """An engine with slow replies, so that a kill hits running streams."""
    with running_fake_engine(Script(pace_seconds=0.004)) as engine:
        yield engine


@contextlib.contextmanager
def proxy_with(
    fault: str, engine: RunningFakeEngine, database_url: str, directory: Path, port: int, ready: list[float]
) -> Iterator[RunningProxy]:
    """Run a proxy that is killed at a fault point, and record the time until it was ready."""
    started = time.monotonic()
    environment = {"TURNWISE_PROXY_FAULT": fault}
    with running_proxy(engine.url, database_url, directory, port=port, environment=environment) as proxy:
        ready.append(time.monotonic() - started)
        yield proxy


@pytest.mark.parametrize("repetitions", REPETITIONS)
def test_a_kill_at_any_point_of_a_call_loses_and_duplicates_no_turn(
    slow_engine, dialect, database_url, tmp_path, repetitions
):
    """The proxy is restarted after each kill and killed at another point; the agents run on.

    The short form kills over PostgreSQL only where it may differ from SQLite.
    """
    points = KILLED_AT if dialect == "sqlite" or repetitions > 1 else STORING
    port, ready, rng = free_port(), [], random.Random(0)
    with playing(f"http://127.0.0.1:{port}", 8) as agents:
        for life in range(repetitions * len(points)):
            point = points[life % len(points)]
            fault = point if point == "mid_reload" else f"{point}:{rng.randint(1, 6)}"
            with proxy_with(fault, slow_engine, database_url, tmp_path, port, ready) as proxy:
                writer = proxy.writing_process()
                agents.go()
                if point == "mid_reload":
                    publish(proxy, write_weights(tmp_path / f"v{life}"), version=life)
                assert proxy.process.wait(WAIT_SECONDS) == -signal.SIGKILL
                wait_until_gone(writer)
                agents.hold()
        with proxy_with("", slow_engine, database_url, tmp_path, port, ready) as proxy:
            finish(agents, proxy, slow_engine)
    report(ready, agents)


def test_a_killed_writing_process_loses_and_duplicates_no_turn(slow_engine, database_url, tmp_path):
    """The proxy keeps running: calls fail until the next writing process is ready, and succeed after that."""
    with (
        running_proxy(slow_engine.url, database_url, tmp_path) as proxy,
        playing(proxy.url, 32) as agents,
    ):
        agents.go()
        for _ in range(WRITERS):
            agents.wait_for(agents.num_agents)
            writer = proxy.writing_process()
            os.kill(writer, signal.SIGKILL)
            wait_until_gone(writer)
        agents.wait_for(agents.num_agents)
        agents.finish()
        assert set(agents.observed.refusals) <= {(503, "store_unavailable"), (200, "store_unavailable")}
        assert_nothing_is_lost_or_doubled(agents, proxy, slow_engine)
        assert metric(proxy, "turnwise_background_errors_total", task="writer") == WRITERS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_writing_process_outlives_its_proxy(start_proxy, slow_engine, number):
    """Under load, so that it has jobs when its proxy is killed; it ends without an error in the log."""
    proxy = start_proxy(slow_engine.url)
    with playing(proxy.url, 8) as agents:
        agents.go()
        agents.wait_for(8)
        writer = proxy.writing_process()
        proxy.process.send_signal(number)
        proxy.process.wait(WAIT_SECONDS)
        wait_until_gone(writer)
    assert "Traceback" not in proxy.log.read_text()


def finish(agents: Crowd, proxy: RunningProxy, engine: RunningFakeEngine) -> None:
    agents.go()
    agents.wait_for(agents.num_agents)
    agents.finish()
    assert_nothing_is_lost_or_doubled(agents, proxy, engine)


def report(ready: list[float], agents: Crowd) -> None:
    clean, *after_kills = ready
    median, slowest = statistics.median(after_kills), max(after_kills)
    print(
        f"\n{len(after_kills)} kills, {len(agents.observed.replies)} replies seen whole; ready at first: "
        f"{clean:.1f} s, again: {median:.1f} s, {slowest:.1f} s"
    )
