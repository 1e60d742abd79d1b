"""Roles of chains through a running proxy: stored, explained, corrected, and used to select what is trained."""

from typing import Any

import httpx2
import orjson
from support.proxies import RunningProxy

TITLES = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
CODER = {"role": "system", "content": "You write code."}
USER = {"role": "user", "content": "Fix the bug."}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def call(proxy: RunningProxy, *messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> str:
    body = {"model": "fake", "messages": list(messages), "tool_choice": "none", **fields}
    if "tools" not in fields:
        del body["tool_choice"]
    reply = httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=body, headers=headers)
    return str(reply.raise_for_status().json()["id"])


def trained(proxy: RunningProxy, **query: str | list[str]) -> list[str]:
    lines = httpx2.get(f"{proxy.v1}/experiences", params=query).raise_for_status().text.splitlines()
    return [turn_id for line in lines for turn_id in orjson.loads(line)["turn_ids"]]


def test_side_calls_are_stored_with_their_role_and_not_trained(proxy):
    """A title call first, the agent, and its sub-agent; then an operator corrects the sub-agent's role."""
    title = call(proxy, TITLES, USER)
    main = call(proxy, CODER, USER, tools=TOOLS)
    sub = call(proxy, USER, tools=TOOLS, headers={"x-claude-code-agent-id": "a1"})
    httpx2.post(f"{proxy.v1}/sessions/s/end", json={"reward": 1.0}).raise_for_status()
    turns = httpx2.get(f"{proxy.v1}/sessions/s/turns").json()["data"]
    assert {turn["turn_id"]: (turn["role"], turn["role_reason"]) for turn in turns} == {
        title: ("side", "asks_for_title"),
        main: ("main", "first_chain"),
        sub: ("sub_agent", "agent_id"),
    }
    assert trained(proxy) == [main, sub]
    assert trained(proxy, role=["side", "main"]) == [title, main]
    corrected = httpx2.post(f"{proxy.v1}/turns/{sub}/role", json={"role": "side"})
    assert corrected.raise_for_status().json() == {"role": "side", "turn_ids": [sub]}
    assert trained(proxy) == [main]
    assert httpx2.get(f"{proxy.v1}/turns/{sub}").json()["role_reason"] == "corrected"
    assert httpx2.post(f"{proxy.v1}/turns/none/role", json={"role": "side"}).status_code == 404
    assert 'turnwise_turns_by_role_total{role="sub_agent"} 1.0' in httpx2.get(f"{proxy.url}/metrics").text


def test_a_summary_is_trained_with_both_chains_and_the_next_context_says_that_it_goes_on_from_it(proxy):
    """The engine repeats the last message: the summary is the text of the request, in a frame of the harness."""
    first = call(proxy, CODER, USER, tools=TOOLS)
    reply = {"role": "assistant", "content": "Fix the bug."}
    compact = {"role": "user", "content": "Summarize our conversation so far."}
    unused = call(proxy, CODER, USER, reply, {"role": "user", "content": "Summarize this conversation."}, tools=TOOLS)
    summary = call(proxy, CODER, USER, reply, compact, tools=TOOLS)
    on = call(proxy, CODER, {"role": "user", "content": f"<summary>{compact['content']}</summary> Go on."}, tools=TOOLS)
    httpx2.post(f"{proxy.v1}/sessions/s/end", json={"reward": 1.0}).raise_for_status()
    turns = httpx2.get(f"{proxy.v1}/sessions/s/turns").json()["data"]
    assert [(turn["turn_id"], turn["role"], turn["outcome"], turn["continues_summary"]) for turn in turns] == [
        (first, "main", "exact", None),
        (unused, "summary", "exact", None),
        (summary, "summary", "exact", None),
        (on, "main", "exact", [summary]),
    ]
    assert [turn["summary_left_out"] for turn in turns] == [None, "not_continued", None, None]
    shown = [httpx2.get(f"{proxy.v1}/turns/{turn['turn_id']}/tokens").json()["segments"][-1] for turn in turns]
    assert [segment["is_trainable"] for segment in shown] == [True, False, True, True]
    lines = httpx2.get(f"{proxy.v1}/experiences", params={"merge": "chain"}).raise_for_status().text.splitlines()
    chains = [orjson.loads(line) for line in lines]
    assert [experience["turn_ids"] for experience in chains] == [[first, summary], [on]]
    assert len({(each["session_id"], each["eid"]["task"], each["eid"]["run"]) for each in chains}) == 1
    assert [each["turn_rewards"] for each in chains] == [[1.0, 1.0], [1.0]]
    assert trained(proxy, role=["main", "sub_agent"]) == [first, on]
