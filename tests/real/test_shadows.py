"""Shadow samples: a live turn of a single session becomes a group, unseen by its agent and counted apart."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import orjson
import pytest
from support.control_plane import metric
from support.proxies import STOP_SECONDS, RunningProxy, StartProxy, running_proxy
from support.waiting import assert_stays, wait_until
from turnwise_fake_engine import RunningFakeEngine
from turnwise_fake_engine.script import Fault, FaultKind, Reply, Rule

from turnwise.client import Client

FLAGS = ("--shadow-replies", "2", "--shadow-turns", "1", "--shadow-tokens", "10")
FIRST = {"role": "user", "content": "Where is Kim?"}
SECOND = {"role": "user", "content": "And her boss?"}


def call(base_url: str, *messages: dict, **fields: object) -> dict:
    body = {"model": "fake", "messages": list(messages), "return_token_ids": True, **fields}
    return httpx2.post(f"{base_url}/chat/completions", json=body).raise_for_status().json()


def shadows(client: Client, turn_id: str) -> list[dict]:
    found = client.sessions(group_id=f"shadow-{turn_id}")
    return sorted((each for each in found if each["status"] == "ended"), key=lambda each: each["run"])


def test_a_turn_of_a_single_session_becomes_a_group_of_replies_to_the_same_prompt(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy
):
    """Two replies and the copy of the real one, each in a session; with rewards the group is trained.

    The turns before are in its prompts. Turns of sessions with a group, and of held-out ones, are not sampled again.
    """
    proxy: RunningProxy = start_proxy(fake_engine.url, *FLAGS)
    with Client(proxy.url) as client:
        own = client.create_session(session_id="s", task_id="kim")
        first = call(own.base_url, FIRST)
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = call(own.base_url, FIRST, reply, SECOND, seed=1)
        for fields in ({"split": "eval"}, {"group_id": "g", "group_size": 2}):
            call(client.create_session(**fields).base_url, FIRST)
        for turn in (first, second):
            wait_until(lambda turn=turn: len(shadows(client, turn["id"])) == 3, "the turn's group is complete")
        group = shadows(client, second["id"])
        assert [each["metadata"]["shadow"]["is_copy"] for each in group] == [True, False, False]
        assert {each["opened_by"] for each in group} == {"shadow"}
        assert {each["task_id"] for each in group} == {"kim"}
        for number, each in enumerate(group):
            client.reward(float(number), session_id=each["session_id"])
        assert client.session("s")["num_turns"] == 2, "its own session holds what its agent has seen"
        shadow_sessions = [each for each in client.sessions() if each["opened_by"] == "shadow"]
        assert len(shadow_sessions) == 6
    query = {"group_id": f"shadow-{second['id']}", "merge": "chain"}
    lines = httpx2.get(f"{proxy.v1}/experiences", params=query).raise_for_status().text.splitlines()
    trained = sorted((orjson.loads(line) for line in lines), key=lambda each: each["reward"])
    assert [each["reward"] for each in trained] == [0.0, 1.0, 2.0]
    prompt = second["prompt_token_ids"]
    assert all(each["tokens"][: len(prompt)] == prompt for each in trained)
    assert [each["prompt_length"] for each in trained] == [len(prompt)] * 3
    assert trained[0]["tokens"][len(prompt) :] == second["choices"][0]["token_ids"]
    assert metric(proxy, "turnwise_turns_total") == 4
    wait_until(lambda: metric(proxy, "turnwise_shadow_turns_total", result="sampled") == 4, "all four are counted")


@pytest.mark.parametrize("point", ["before_commit:2", "after_commit_before_reply:2"])
def test_a_proxy_killed_in_a_shadow_sample_leaves_the_real_turn_alone_and_no_group_to_train(
    fake_engine: RunningFakeEngine, database_url: str, tmp_path: Path, point: str
):
    """The first commit is the agent's turn, the second the shadow reply's. The next proxy samples for later turns."""
    fault = {"TURNWISE_PROXY_FAULT": point}
    with (
        running_proxy(fake_engine.url, database_url, tmp_path, *FLAGS, environment=fault) as killed,
        Client(killed.url) as client,
    ):
        first = call(client.create_session(session_id="s").base_url, FIRST)
        assert killed.process.wait(STOP_SECONDS) == -signal.SIGKILL
    with running_proxy(fake_engine.url, database_url, tmp_path, *FLAGS) as proxy, Client(proxy.url) as client:
        assert [turn["turn_id"] for turn in client.turns("s")] == [first["id"]]
        assert shadows(client, first["id"]) == []
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = call(client.create_session(session_id="s").base_url, FIRST, reply, SECOND)
        assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
        wait_until(lambda: len(shadows(client, second["id"])) == 3, "the turn's group is complete")
        assert client.session("s")["num_turns"] == 2
        assert metric(proxy, "turnwise_turns_total") == 1


def test_shadow_samples_stay_below_their_share_of_tokens(fake_engine: RunningFakeEngine, start_proxy: StartProxy):
    """Of the first turn one reply is sampled, since none counts yet; then the share of 0.1 is exceeded."""
    proxy = start_proxy(fake_engine.url, *FLAGS[:-1], "0.1")
    with Client(proxy.url) as client:
        first = call(client.create_session().base_url, FIRST)
        wait_until(lambda: metric(proxy, "turnwise_shadow_turns_total", result="sampled") == 1, "one is sampled")
        sampled = len(first["choices"][0]["token_ids"])
        for number in range(8):
            call(client.create_session().base_url, {"role": "user", "content": f"Where is {number}?"})
        assert metric(proxy, "turnwise_shadow_tokens_total") <= sampled * 2


@contextlib.contextmanager
def hanging_call(proxy: RunningProxy) -> Iterator[None]:
    """Run a call that the engine does not answer; its client leaves at the end of the block."""
    body = orjson.dumps({"model": "fake", "messages": [{"role": "user", "content": "hang"}]})
    address = urlsplit(proxy.url)
    fields = {"Host": address.netloc, "Content-Type": "application/json", "Content-Length": len(body)}
    lines = ["POST /v1/chat/completions HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall("\r\n".join(lines).encode() + body)
        yield


def test_nothing_is_sampled_while_a_call_runs(fake_engine: RunningFakeEngine, start_proxy: StartProxy):
    """A turn is chosen while another call still runs: the engine gets no shadow sample before that call has ended."""
    proxy = start_proxy(fake_engine.url, *FLAGS)
    fake_engine.calls.clear()  # the calls of the proxy's probe
    fake_engine.fail_next(Fault(kind=FaultKind.HANG, contains="hang"))
    with hanging_call(proxy), Client(proxy.url) as client:
        wait_until(lambda: len(fake_engine.calls) == 1, "the engine has the call")
        call(client.create_session().base_url, FIRST)
        assert_stays(lambda: len(fake_engine.calls) == 2, "the engine has the two calls alone", seconds=0.5)
    wait_until(lambda: metric(proxy, "turnwise_shadow_turns_total", result="sampled") == 2, "both are sampled")
    assert metric(proxy, "turnwise_shadow_turns_total") == 2


def test_a_call_that_arrives_ends_a_shadow_sample_and_takes_no_other_place_than_without_it(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy
):
    """The shadow sample would take minutes, and the proxy has one place: the call is answered all the same.

    A shadow sample that was ended is sampled again when the call is over, and counts in no histogram of calls.
    """
    proxy = start_proxy(fake_engine.url, *FLAGS, "--max-concurrent-calls", "1")
    fake_engine.calls.clear()  # the calls of the proxy's probe
    slow = Reply(text="word " * 60, pace_seconds=5.0)
    fake_engine.answer(Rule(reply=slow, contains=FIRST["content"]))
    fake_engine.answer(Rule(reply=Reply(text="Oslo"), contains=FIRST["content"], count=1))
    with Client(proxy.url) as client:
        call(client.create_session().base_url, FIRST)
        wait_until(lambda: len(fake_engine.calls) == 2, "the first shadow sample runs")
        for number in range(3):
            call(client.create_session(split="eval").base_url, {"role": "user", "content": f"Where is {number}?"})
            interrupted = number + 1
            wait_until(
                lambda: metric(proxy, "turnwise_shadow_turns_total", result="interrupted") == interrupted,  # noqa: B023
                "the shadow sample was ended",
            )
            wait_until(lambda: len(fake_engine.calls) == 4 + 2 * number, "it is sampled again")  # noqa: B023
    outcomes = [each.outcome for each in fake_engine.calls]
    assert outcomes[:7:2] == ["finished"] * 4
    wait_until(lambda: [each.outcome for each in fake_engine.calls][1:7:2] == ["aborted"] * 3, "the engine knows")
    assert metric(proxy, "turnwise_call_seconds_count") == 4
    assert metric(proxy, "turnwise_turns_total") == 4
    proxy.process.terminate()
    proxy.process.wait(STOP_SECONDS)
    assert "Traceback" not in proxy.log.read_text(), "it stops while a shadow sample runs"
