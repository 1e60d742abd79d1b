"""`kill -9` of the proxy, or of what writes for it: what a client saw whole is stored, once.

Only the proxy is killed, at every named point of a call and at any moment; the process that writes has to see to its
own end, before the next proxy begins, so that it stores nothing that its proxy has left behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.control_plane import metric, publish
from support.proxies import RunningProxy, running_proxy, wait_until_gone
from support.retrying_agents import Agents, assert_nothing_is_lost_or_doubled, playing, wait_for
from support.tiny_checkpoints import write_weights

from proxy.fault import POINTS
from turnwise.fake_engine import RunningFakeEngine, Script, running_fake_engine
from turnwise.processes.stack import free_port

READY_SECONDS = 5.0
"""How soon a proxy that was killed serves again, at the median; see `report`."""
DIES_SECONDS = 30.0
WRITERS = 3
"""How many writing processes one proxy loses."""
REPETITIONS = [1, pytest.param(20, marks=pytest.mark.slow)]
MOMENTS = [3, pytest.param(100, marks=pytest.mark.slow)]


@pytest.fixture
def slow_engine() -> Iterator[RunningFakeEngine]:
    """An engine whose replies take a moment, so that a kill finds streams on their way."""
    with running_fake_engine(Script(pace_seconds=0.004)) as engine:
        yield engine


@contextlib.contextmanager
def proxy_with(
    fault: str, engine: RunningFakeEngine, database_url: str, directory: Path, port: int, ready: list[float]
) -> Iterator[RunningProxy]:
    """Run a proxy that dies at a point, and note how long it took until it was ready."""
    started = time.monotonic()
    environment = {"TURNWISE_PROXY_FAULT": fault}
    with running_proxy(engine.url, database_url, directory, port=port, environment=environment) as proxy:
        ready.append(time.monotonic() - started)
        yield proxy


@pytest.mark.parametrize("repetitions", REPETITIONS)
def test_a_kill_at_any_point_of_a_call_loses_nothing_and_doubles_nothing(
    slow_engine, database_url, tmp_path, repetitions
):
    """One life of the proxy after the other, each ended at another point; the agents never start anew."""
    port, ready, rng = free_port(), [], random.Random(0)
    with playing(f"http://127.0.0.1:{port}", 8) as agents:
        for life in range(repetitions * len(POINTS)):
            point = POINTS[life % len(POINTS)]
            fault = point if point == "mid_reload" else f"{point}:{rng.randint(1, 6)}"
            with proxy_with(fault, slow_engine, database_url, tmp_path, port, ready) as proxy:
                writer = proxy.writing_process()
                agents.go()
                if point == "mid_reload":
                    publish(proxy, write_weights(tmp_path / f"v{life}"), version=life)
                assert proxy.process.wait(DIES_SECONDS) == -signal.SIGKILL
                wait_until_gone(writer)
                agents.hold()
        with proxy_with("", slow_engine, database_url, tmp_path, port, ready) as proxy:
            finish(agents, proxy, slow_engine)
    report(ready, agents)


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_kill_at_any_moment_under_32_streams_loses_nothing_and_doubles_nothing(
    slow_engine, database_url, tmp_path, moments
):
    """The agents call all the time, also while the proxy starts."""
    port, ready, rng = free_port(), [], random.Random(1)
    with playing(f"http://127.0.0.1:{port}", 32) as agents:
        agents.go()
        for _ in range(moments):
            with proxy_with("", slow_engine, database_url, tmp_path, port, ready) as proxy:
                writer = proxy.writing_process()
                time.sleep(rng.uniform(0.0, 1.0))  # the moment is what is tested: any will do
                proxy.kill()
                wait_until_gone(writer)
        with proxy_with("", slow_engine, database_url, tmp_path, port, ready) as proxy:
            finish(agents, proxy, slow_engine)
    report(ready, agents)


def test_a_writing_process_that_is_killed_loses_nothing_and_doubles_nothing(slow_engine, database_url, tmp_path):
    """The proxy goes on: what comes before the next one writes is told so, and what comes after works."""
    with (
        running_proxy(slow_engine.url, database_url, tmp_path) as proxy,
        playing(proxy.url, 32) as agents,
    ):
        agents.go()
        for _ in range(WRITERS):
            wait_for(agents, len(agents.all))
            writer = proxy.writing_process()
            os.kill(writer, signal.SIGKILL)
            wait_until_gone(writer)
        wait_for(agents, len(agents.all))
        agents.stop()
        assert agents.refusals == {(503, "store_unavailable")}
        assert_nothing_is_lost_or_doubled(agents, proxy, slow_engine)
        assert metric(proxy, "turnwise_background_errors_total", task="writer") == WRITERS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_writing_process_outlives_its_proxy(start_proxy, slow_engine, number):
    """Under load, so that it has something to write when its proxy ends; it says nothing of that."""
    proxy = start_proxy(slow_engine.url)
    with playing(proxy.url, 8) as agents:
        agents.go()
        wait_for(agents, 8)
        writer = proxy.writing_process()
        proxy.process.send_signal(number)
        proxy.process.wait(DIES_SECONDS)
        wait_until_gone(writer)
    assert "Traceback" not in proxy.log.read_text()


def finish(agents: Agents, proxy: RunningProxy, engine: RunningFakeEngine) -> None:
    """Let the agents get through a last proxy, then count."""
    agents.go()
    wait_for(agents, len(agents.all))
    agents.stop()
    assert_nothing_is_lost_or_doubled(agents, proxy, engine)


def report(ready: list[float], agents: Agents) -> None:
    """Print what was measured, and check that a proxy is soon back; a single start may meet a busy machine."""
    clean, *after_kills = ready
    median, slowest = statistics.median(after_kills), max(after_kills)
    print(
        f"\n{len(after_kills)} kills, {agents.num_seen} replies seen whole; ready at first: {clean:.1f} s, "
        f"again: {median:.1f} s, {slowest:.1f} s"
    )
    # A busy machine takes long to start anything: what a crash may not do is make a start slower than a clean one.
    allowed = max(READY_SECONDS, 2 * clean)
    assert median < allowed
    assert slowest < 3 * allowed
