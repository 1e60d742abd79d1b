"""Forks: a session that continues from a turn of another one, on the very same tokens."""

from typing import Any

import httpx2
import orjson
import pytest
from support.proxies import RunningProxy

from turnwise.client import Client
from turnwise.errors import NotFound

FIRST = {"role": "user", "content": "Where is Kim?"}
SECOND = {"role": "user", "content": "And her boss?"}
OTHER = {"role": "user", "content": "And her friend?"}


def call(base_url: str, *messages: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "fake", "messages": list(messages), "return_token_ids": True}
    return httpx2.post(f"{base_url}/chat/completions", json=body).raise_for_status().json()


def message(reply: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


def trained(proxy: RunningProxy, session_id: str) -> list[dict[str, Any]]:
    query = {"session_id": session_id, "merge": "chain"}
    lines = httpx2.get(f"{proxy.v1}/experiences", params=query).raise_for_status().text.splitlines()
    return [orjson.loads(line) for line in lines]


def test_a_fork_continues_with_the_same_tokens_and_trains_only_its_own_samples(proxy):
    """Two forks of a turn get the prompt that its own session got; so does a fork before the turn."""
    with Client(proxy.url) as client:
        own = client.create_session(session_id="s", task_id="kim")
        first = call(own.base_url, FIRST)
        second = call(own.base_url, FIRST, message(first), SECOND)
        group = {"group_id": "g", "group_size": 2}
        forks = [client.fork(first["id"], session_id=f"f{number}", run=number, **group) for number in (0, 1)]
        messages = [FIRST, message(first), SECOND]
        replies = [call(fork.base_url, *messages) for fork in forks]
        assert [reply["prompt_token_ids"] for reply in replies] == [second["prompt_token_ids"]] * 2
        again = client.fork(second["id"], at="before", session_id="again")
        assert call(again.base_url, *messages)["prompt_token_ids"] == second["prompt_token_ids"]
        other = call(again.base_url, FIRST, message(first), OTHER)
        assert other["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]
        fork = forks[0]
        assert (fork.data["task_id"], fork.data["num_turns"]) == ("kim", 1)
        assert fork.data["metadata"] == {"forked_from": {"session_id": "s", "turn_id": first["id"]}}
        assert client.fork(first["id"], session_id="f0", **group).data["num_turns"] == 2, "the same session, not a copy"
        turns = list(fork.turns())
        assert [(turn["outcome"], turn["reason"]) for turn in turns] == [("untrainable", "forked"), ("exact", None)]
        assert turns[1]["parent_turn_id"] == turns[0]["turn_id"] != first["id"]
        fork.end(reward=1.0)
    (experience,) = trained(proxy, "f0")
    assert experience["turn_ids"] == [replies[0]["id"]]
    prompt, sampled = replies[0]["prompt_token_ids"], replies[0]["choices"][0]["token_ids"]
    assert experience["tokens"] == prompt + sampled
    assert (experience["prompt_length"], experience["loss_mask"]) == (len(prompt), [True] * len(sampled))


def test_the_root_can_be_sampled_again_and_an_unknown_turn_cannot_be_forked(proxy):
    with Client(proxy.url) as client:
        first = call(client.create_session(session_id="s").base_url, FIRST)
        again = client.fork(first["id"], at="before")
        assert again.data["num_turns"] == 0
        assert call(again.base_url, FIRST)["prompt_token_ids"] == first["prompt_token_ids"]
        with pytest.raises(NotFound, match="there is no turn 'none'"):
            client.fork("none")
