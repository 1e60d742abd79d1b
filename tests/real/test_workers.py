"""Several serving processes behind one port, and several proxies over one store."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from chaos.agents import playing
from chaos.invariants import assert_nothing_is_lost_or_doubled
from pydantic import PrivateAttr
from support.commands import run_turnwise
from support.control_plane import ask, metric, publish, wait_for_status
from support.proxies import (
    ProxyAndEngine,
    RunningProxy,
    running_proxy,
    wait_until_gone,
)
from support.tiny_checkpoints import write_weights
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Reply, Script, running_fake_engine
from turnwise_fake_engine.ledger import EngineState

NUM_CONNECTIONS = 16
"""Each to a worker that the kernel chooses: all to the same one once in 30,000 times."""


def wait_for_workers(proxy: RunningProxy, num_started: int) -> None:
    wait_until(lambda: proxy.log.read_text().count(" serves on port ") == num_started, "the workers serve")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyAndEngine]:
    """Two workers over SQLite, for the whole module; connections stay where the kernel puts them."""
    directory = tmp_path_factory.mktemp("workers")
    database_url = f"sqlite:///{directory}/turnwise.db"
    flags = ("--workers", "2", "--no-session-affinity")
    with running_fake_engine() as engine, running_proxy(engine.url, database_url, directory, *flags) as proxy:
        wait_for_workers(proxy, 2)
        engine.calls.clear()
        yield ProxyAndEngine(proxy, engine)


def converse(proxy: RunningProxy, question: str, **headers: str) -> list[str]:
    """Play a conversation, each turn over its own connection; return the turns' ids."""
    messages: list[dict] = []
    turn_ids = []
    for number in range(NUM_CONNECTIONS):
        messages.append({"role": "user", "content": f"{question} {number}"})
        reply = ask(proxy.url, "/v1/chat/completions", {"model": "fake", "messages": messages}, headers=headers)
        messages.append(reply["choices"][0]["message"])
        turn_ids.append(reply["id"])
    return turn_ids


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "inferred"])
def test_a_conversation_that_moves_between_workers_is_one_exact_chain(shared, session_id, is_named):
    seen = converse(shared.proxy, session_id, **({"x-session-id": session_id} if is_named else {}))
    turns = [view.turn for view in shared.proxy.turns() if view.turn.turn_id in seen]
    assert [turn.turn_id for turn in turns] == seen
    assert [turn.parent_turn_id for turn in turns] == [None, *seen[:-1]]
    assert {turn.outcome for turn in turns} == {"exact"}


def test_all_workers_apply_the_sampling_of_a_session_that_is_changed_through_one_of_them(shared, session_id):
    url, body = f"{shared.proxy.url}/sessions/{session_id}", {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(NUM_CONNECTIONS):  # until both workers have it in memory
        ask(url, "/v1/chat/completions", body)
    ask(shared.proxy.url, "/v1/sessions", {"session_id": session_id, "sampling": {"temperature": 0.25}})

    def is_applied() -> bool:
        shared.engine.calls.clear()
        for _ in range(NUM_CONNECTIONS):
            ask(url, "/v1/chat/completions", body)
        return {call.body.get("temperature") for call in shared.engine.calls} == {0.25}

    wait_until(is_applied, "both workers apply it")


def test_metrics_are_summed_over_the_workers_and_keep_the_counts_of_a_killed_one(shared, session_id):
    proxy = shared.proxy
    converse(proxy, session_id)
    num_turns = len(proxy.turns())
    assert {metric(proxy, "turnwise_turns_total") for _ in range(NUM_CONNECTIONS)} == {num_turns}
    killed = proxy.workers()[0]
    os.kill(killed, signal.SIGKILL)
    wait_for_workers(proxy, 3)
    assert metric(proxy, "turnwise_turns_total") == num_turns
    assert metric(proxy, "turnwise_engine_up") == 1
    assert metric(proxy, "process_open_fds", pid=str(killed)) == 0


def test_a_killed_worker_loses_and_duplicates_no_turn_and_is_replaced(database_url, tmp_path):
    """The agents retry; the calls of the other worker run on. SIGTERM ends all workers.

    The workers hand half of the 16 agents' connections to each other: none of them once in 65,000 times.
    """
    with (
        running_fake_engine(Script(pace_seconds=0.004)) as engine,
        running_proxy(engine.url, database_url, tmp_path, "--workers", "2") as proxy,
    ):
        with playing(proxy.url, 16) as agents:
            agents.go()
            wait_for_workers(proxy, 2)
            agents.wait_for(agents.num_agents)
            os.kill(proxy.workers()[0], signal.SIGKILL)
            agents.wait_for(3 * agents.num_agents)
            wait_for_workers(proxy, 3)
            agents.wait_for(agents.num_agents)
            agents.finish()
        assert metric(proxy, "turnwise_handed_over_total") > 0
        assert_nothing_is_lost_or_doubled(agents, proxy, engine)
        found = proxy.workers()
        proxy.process.terminate()
        assert proxy.process.wait(WAIT_SECONDS) == 0
        for pid in found:
            wait_until_gone(pid)


class NamedWeights(Script):
    """Every reply is the name of the directory that the served weights are from."""

    _state: EngineState = PrivateAttr()

    def take_reply(self, last_message: str, *, offers_tools: bool = False) -> Reply | None:
        del last_message, offers_tools
        return Reply(text=Path(self._state.weights_path).name)


def test_a_reload_of_two_workers_fails_no_call_and_is_driven_once(tmp_path):
    """Whole replies name the version that they are from, on both workers, and each engine loads each version once.

    The fake engine chooses a reply when its request arrives, so a stream that crosses a reload says what was served
    before its first token.
    """
    with running_fake_engine() as first, running_fake_engine() as second:
        for engine in (first, second):
            engine.state.script = NamedWeights(pace_seconds=0.002)
            engine.state.script._state = engine.state
        flags = ("--engine", second.url, "--workers", "2")
        with running_proxy(first.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path, *flags) as proxy:
            wait_for_workers(proxy, 2)
            names: dict[int, str] = {}

            def serve(name: str) -> None:
                version = publish(proxy, write_weights(tmp_path / name))
                names[version] = name
                wait_for_status(proxy, version, "active")

            serve("weights0")
            with playing(proxy.url, 8, is_varied=False) as agents:
                agents.go()
                for name in ("weights1", "weights2"):
                    agents.wait_for(agents.num_agents)
                    serve(name)
                    agents.wait_for(2 * agents.num_agents)
                agents.finish()
            turns = [view.turn for view in proxy.turns()]
            converse(proxy, "after", **{"x-session-id": "after"})
            assert metric(proxy, "turnwise_turns_total", outcome="error") == 0
            assert {view.turn.response["content"] for view in proxy.turns("after")} == {"weights2"}
    assert {turn.outcome for turn in turns} == {"exact"}
    seen = [
        (turn.response["content"], names.get(turn.policy_version_first), names.get(turn.policy_version_last))
        for turn in turns
        if turn.ttft_seconds is None
    ]
    assert len(seen) > 8
    assert [each for each in seen if each[0] not in each[1:]] == []
    assert {turn.policy_version_last for turn in turns} == set(names)
    loaded = [[Path(path).name for path in engine.state.reloads] for engine in (first, second)]
    assert loaded == [[*names.values()]] * 2


def test_the_workers_end_with_their_killed_parent(tmp_path):
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with running_fake_engine() as engine, running_proxy(engine.url, url, tmp_path, "--workers", "2") as proxy:
        found = proxy.workers()
        assert len(found) == 2
        proxy.kill()
        for pid in found:
            wait_until_gone(pid)


def test_a_worker_that_cannot_start_ends_the_command_with_its_reason(tmp_path):
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with (
        running_fake_engine(Script(logprobs_mode="raw_logprobs")) as engine,
        pytest.raises(pytest.fail.Exception, match="processed_logprobs") as failed,
        running_proxy(engine.url, url, tmp_path, "--workers", "2"),
    ):
        pass
    assert "Traceback" not in str(failed.value)


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def call(proxy: RunningProxy, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT, headers=headers)


def ending(proxy: RunningProxy, session_id: str) -> tuple[str, str | None]:
    turn = proxy.turns(session_id)[-1].turn
    return turn.outcome.value, turn.reason


def test_a_session_that_another_proxy_ended_gets_one_turn_that_is_not_trained(fake_engine, start_proxy):
    """Without the second look, all later turns of the session would be lost for training."""
    one = start_proxy(fake_engine.url)
    other = start_proxy(fake_engine.url, database_url=one.database_url)
    call(other, **{"x-session-id": "app"}).raise_for_status()
    httpx2.post(f"{one.v1}/sessions/app/end", json={}).raise_for_status()
    call(other, **{"x-session-id": "app"}).raise_for_status()
    assert ending(one, "app") == ("untrainable", "session_ended")
    later = call(other, **{"x-session-id": "app"})
    assert later.headers["x-session-id"] == "app~2"
    assert ending(one, "app~2") == ("exact", None)


def test_a_second_proxy_on_the_port_of_a_running_one_leaves_it_alone(fake_engine, start_proxy, tmp_path):
    running = start_proxy(fake_engine.url)
    port = running.url.rpartition(":")[2]
    done = run_turnwise("proxy", "--engine", fake_engine.url, "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert len([line for line in done.stderr.splitlines() if line.startswith("turnwise: ")]) == 1, done.stderr
    assert running.process.poll() is None
