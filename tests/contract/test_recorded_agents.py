"""The recorded calls of the agents of docs/agents.md, through a proxy again: which of them are trained."""

from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from harnesses.recording import Recordings
from harnesses.registry import HARNESSES, SHORTENING
from harnesses.shortening import SUMMARY, TITLE
from support.proxies import ProxyAndEngine
from turnwise_fake_engine import Reply, Rule, ToolCall

from turnwise.types import TRAINED_ROLES

Json = dict[str, Any]
RECORDED = Recordings().read()
MOST_TOKENS = 4096
"""The engine has a shorter context than those that were played."""
SIDE = {"opencode": {"asks_for_title"}, "gptme": {"asks_for_title"}}
"""What agents ask for beside their work and their summaries."""


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=60) as client:
        yield client


def replayed(world: ProxyAndEngine, http: httpx2.Client, calls: Sequence[Json]) -> list[Json]:
    """Make the calls of an agent again, with the replies that they had; return their turns."""
    v1, rules, turn_ids, turns = world.proxy.v1, world.engine.state.script.rules, [], dict[str, Json]()
    sessions = set()
    for call in calls:
        called = [ToolCall(**each) for each in call["reply"]["tool_calls"]]
        rules[:] = [Rule(reply=Reply(text=call["reply"]["content"], tool_calls=called))]
        limits = {name: min(limit, MOST_TOKENS) for name, limit in call["limits"].items()}
        body = {"model": "fake", "messages": call["messages"], **limits}
        if call["tools"]:
            body["tools"] = [{"type": "function", "function": {"name": call["tools"], "parameters": {}}}]
        is_named = not call["session"].startswith("auto-")
        url = world.proxy.session_v1(call["session"]) if is_named else v1
        agent = {"x-claude-code-agent-id": "recorded"} if call["role_reason"] == "agent_id" else {}
        answer = http.post(f"{url}/chat/completions", json=body, headers=agent).raise_for_status()
        turn_ids.append(answer.json()["id"])
        sessions.add(answer.headers["x-session-id"])
    for session_id in sessions:  # ended, so that no agent's call is taken for one of another's conversation
        http.post(f"{v1}/sessions/{session_id}/end").raise_for_status()
        found = http.get(f"{v1}/sessions/{session_id}/turns", params={"limit": 500}).raise_for_status()
        turns |= {turn["turn_id"]: turn for turn in found.json()["data"]}
    return [turns[each] for each in turn_ids]


def asked_for(call: Json) -> str:
    """Return the role of a call; the script that answered it told summaries and titles apart by their prompts."""
    said: str = call["reply"]["content"]
    return "summary" if said.startswith(SUMMARY) else "side" if said == TITLE else call["role"]


def test_each_agent_has_calls_that_were_recorded():
    assert {harness.name for harness in (*HARNESSES, *SHORTENING)} == RECORDED.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_an_agents_summaries_are_trained_and_its_titles_topics_and_probes_are_not(shared_proxy, http, name):
    turns = replayed(shared_proxy, http, RECORDED[name])
    assert [turn["role"] for turn in turns] == [asked_for(call) for call in RECORDED[name]]
    assert {turn["role_reason"] for turn in turns if turn["role"] not in TRAINED_ROLES} == SIDE.get(name, set())
