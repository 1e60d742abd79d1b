"""Engines that die, hang or refuse during a reload: the others keep serving, and no waiting call is refused.

Two fake engines, each in its own process. The first tries each version; a version that breaks it is not loaded by the
second.
"""

import concurrent.futures
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.breakable_engine import DIE, LOADING, BreakableEngine
from support.control_plane import ask, metric, policy, publish, versions_of_engines, wait_for_status
from support.ports import free_port
from support.proxies import RunningProxy, StartProxy
from support.tiny_checkpoints import write_weights
from support.waiting import WAIT_SECONDS, assert_stays, wait_until

from turnwise.types import Outcome

NUM_SESSIONS = 24


@pytest.fixture
def engines() -> Iterator[list[BreakableEngine]]:
    """Two engines; the first breaks as it loads certain directories, the second only at `follower`."""
    started = [
        BreakableEngine(free_port(), deadly="die", late="die_late", hanging="hang", refused="refuse"),
        BreakableEngine(free_port(), follower="die"),
    ]
    try:
        yield started
    finally:
        for engine in started:
            engine.kill()


@pytest.fixture
def proxy(
    engines: list[BreakableEngine], start_proxy: StartProxy, tmp_path: Path, request: pytest.FixtureRequest
) -> RunningProxy:
    """A proxy whose engines are on version 1; it is as patient as usual, unless an engine hangs in the test."""
    limit = ("--reload-timeout-seconds", "15") if "hanging" in request.node.name else ()
    proxy = start_proxy(engines[0].url, "--engine", engines[1].url, *limit)
    wait_until(lambda: len(versions_of_engines(proxy)) == 2, "both engines are ready")
    publish_weights(proxy, tmp_path / "v1", 1)
    wait_for_status(proxy, 1, "active")
    wait_until(
        lambda: versions_of_engines(proxy) == {engine.url: 1 for engine in engines}, "both engines are on version 1"
    )
    return proxy


def publish_weights(proxy: RunningProxy, place: Path, version: int) -> None:
    publish(proxy, write_weights(place), version=version)


def call(proxy: RunningProxy, session_id: str, text: str = "Hello.") -> tuple[int, str]:
    """Make one call; return its status and body."""
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{proxy.session_v1(session_id)}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def call_all(proxy: RunningProxy, name: str) -> list[tuple[int, str]]:
    with concurrent.futures.ThreadPoolExecutor(NUM_SESSIONS) as executor:
        return list(executor.map(lambda number: call(proxy, f"{name}-{number}"), range(NUM_SESSIONS)))


def sampled_versions(proxy: RunningProxy, name: str) -> set[int]:
    return {view.turn.policy_version_last for view in proxy.turns() if view.turn.session_id.startswith(name)}


@pytest.mark.parametrize("fault", ["deadly", "hanging", "refused"])
def test_a_version_that_breaks_the_first_engine_is_loaded_by_no_other(proxy, engines, tmp_path, fault):
    publish_weights(proxy, tmp_path / fault, 2)
    failed = wait_for_status(proxy, 2, "failed")
    assert "version 2 was not loaded" in failed["error"]
    assert {status for status, _ in call_all(proxy, "meanwhile")} == {200}
    assert sampled_versions(proxy, "meanwhile") == {1}
    assert policy(proxy, 1)["status"] == "active"
    if fault != "refused":
        wait_until(lambda: versions_of_engines(proxy) == {engines[1].url: 1}, "the broken engine gets no calls")
        engines[0].restart()
    wait_until(
        lambda: versions_of_engines(proxy) == {engine.url: 1 for engine in engines}, "both engines are on version 1"
    )
    publish_weights(proxy, tmp_path / "v3", 3)
    wait_for_status(proxy, 3, "active")
    wait_until(
        lambda: versions_of_engines(proxy) == {engine.url: 3 for engine in engines}, "both engines are on version 3"
    )


def test_calls_that_wait_for_an_engine_that_dies_are_served_by_another(proxy, engines, tmp_path):
    """Calls that the engine has not received wait while it loads, and move to the other when it dies."""
    publish_weights(proxy, late := tmp_path / "late", 2)
    wait_until((late / LOADING).exists, "the first engine is loading")
    with concurrent.futures.ThreadPoolExecutor(NUM_SESSIONS) as executor:
        calls = [executor.submit(call, proxy, f"waited-{number}") for number in range(NUM_SESSIONS)]
        assert_stays(lambda: not all(each.done() for each in calls), "a call waits for the first engine", 0.3)
        (late / DIE).touch()
        assert {each.result()[0] for each in calls} == {200}
    assert sampled_versions(proxy, "waited") == {1}
    wait_for_status(proxy, 2, "failed")
    wait_until(lambda: versions_of_engines(proxy) == {engines[1].url: 1}, "the dead engine gets no calls")


def test_an_engine_that_fails_a_version_which_another_serves_is_taken_out_and_brought_up_to_date(
    proxy, engines, tmp_path
):
    """The first engine shows that the version is good. The second restarts with its original weights and loads it."""
    publish_weights(proxy, tmp_path / "follower", 2)
    wait_for_status(proxy, 2, "active")
    wait_until(lambda: versions_of_engines(proxy) == {engines[0].url: 2}, "the second engine is taken out")
    assert {status for status, _ in call_all(proxy, "alone")} == {200}
    engines[1].kill()
    engines[1] = BreakableEngine(int(engines[1].url.rpartition(":")[2]))
    wait_until(
        lambda: versions_of_engines(proxy) == {engine.url: 2 for engine in engines}, "both engines are on version 2"
    )
    assert ask(engines[1].url, "/fake/state")["reloads"] == [str(tmp_path / "follower")]
    assert {status for status, _ in call_all(proxy, "both")} == {200}
    assert sampled_versions(proxy, "both") == {2}


def test_calls_in_flight_to_an_engine_that_dies_are_sampled_anew_by_another(proxy, engines):
    """The engine is paused, so that none of its calls ends before it dies."""
    text = "a long story " * 40
    ask(engines[0].url, "/pause?mode=keep", {})
    with concurrent.futures.ThreadPoolExecutor(NUM_SESSIONS) as executor:
        running = [executor.submit(call, proxy, f"doomed-{number}", text) for number in range(NUM_SESSIONS)]
        wait_until(lambda: ask(engines[0].url, "/fake/calls")["num_calls"] >= 3, "the first engine has calls")
        engines[0].kill()
        assert {future.result(WAIT_SECONDS)[0] for future in running} == {200}
    outcomes = [view.turn.outcome for view in proxy.turns() if view.turn.session_id.startswith("doomed")]
    assert outcomes == [Outcome.EXACT] * NUM_SESSIONS
    assert metric(proxy, "turnwise_retries_total", what="engine") >= 3
    wait_until(lambda: versions_of_engines(proxy) == {engines[1].url: 1}, "the dead engine is taken out")
    assert {status for status, _ in call_all(proxy, "after")} == {200}
