"""Shadow samples: a live turn of a single session becomes a group, unseen by its agent and counted apart."""

from __future__ import annotations

import httpx2
import orjson
from support.control_plane import metric
from support.proxies import RunningProxy, StartProxy
from support.waiting import wait_until

from turnwise.client import Client
from turnwise.fake_engine import RunningFakeEngine

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
    assert metric(proxy, "turnwise_shadow_turns_total", result="sampled") == 4


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
