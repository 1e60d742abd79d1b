"""Calls that name no session: the proxy finds it by the conversation, also after a restart."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from support.control_plane import metric
from support.migrated import writing
from support.proxies import RunningProxy, StartProxy
from support.waiting import wait_until
from turnwise_fake_engine import RunningFakeEngine
from turnwise_fake_engine.script import Fault, Reply, Rule, ToolCall

from turnwise.store import keys
from turnwise.store.database import Database
from turnwise.store.schema import sessions

Message = dict[str, Any]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


def call(proxy: RunningProxy, messages: list[Message], tools: Sequence[Message] = (), **headers: str) -> Message:
    body: Message = {"model": "fake", "messages": messages}
    if tools:
        body |= {"tools": list(tools)}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx2.post(f"{proxy.v1}/chat/completions", json=body, headers=given).raise_for_status().json()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def played(
    proxy: RunningProxy, messages: list[Message], text: str, tools: Sequence[Message] = (), **headers: str
) -> list[Message]:
    """Send one more user message; return the conversation with the reply."""
    asked = [*messages, user(text)]
    return [*asked, call(proxy, asked, tools, **headers)["choices"][0]["message"]]


def sessions_of(proxy: RunningProxy) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for view in proxy.turns():
        found.setdefault(view.turn.session_id, []).append(view.messages[-1]["content"])
    return found


def restarted(start_proxy: StartProxy, proxy: RunningProxy, engine: RunningFakeEngine, *flags: str) -> RunningProxy:
    proxy.kill()
    return start_proxy(engine.url, *flags, database_url=proxy.database_url)


@pytest.fixture
def proxy(empty_proxy: RunningProxy) -> RunningProxy:
    return empty_proxy


@pytest.fixture
def fake_engine(shared_engine: RunningFakeEngine) -> RunningFakeEngine:
    return shared_engine


@pytest.fixture
def two_keys(database_url: str) -> list[str]:
    with writing(database_url) as connection:
        return [keys.create_key(connection, "default", keys.KeyRole.AGENT, name)[1] for name in ("a", "b")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_names_its_session(proxy, stream):
    body = {"model": "fake", "messages": [user("Hello.")], "stream": stream}
    named = httpx2.post(f"{proxy.url}/sessions/mine/v1/chat/completions", json=body)
    assert named.headers["x-session-id"] == "mine"
    inferred = httpx2.post(f"{proxy.v1}/chat/completions", json=body).headers["x-session-id"]
    assert {view.turn.session_id for view in proxy.turns()} == {"mine", inferred}


def test_a_conversation_stays_in_its_session_over_a_restart(database_url, fake_engine, start_proxy):
    """It also stays on its chain: the prompt extends the stored tokens."""
    proxy = start_proxy(fake_engine.url, database_url=database_url)
    conversations = [played(proxy, [], name) for name in ("one", "two")]
    proxy = restarted(start_proxy, proxy, fake_engine)
    conversations = [played(proxy, messages, "on") for messages in conversations]
    proxy = restarted(start_proxy, proxy, fake_engine)
    for messages in conversations:
        played(proxy, messages, "and on")
    assert sorted(sessions_of(proxy).values()) == [["one", "on", "and on"], ["two", "on", "and on"]]
    views = proxy.turns()
    assert len({view.turn.chain_id for view in views}) == 2
    assert {view.turn.outcome.value for view in views} == {"exact"}


def test_a_restarted_proxy_prefers_the_longer_conversation_that_is_stored(fake_engine, start_proxy):
    """Two agents start alike; after the restart one starts again, and memory holds only that start."""
    proxy = start_proxy(fake_engine.url)
    longer = played(proxy, played(proxy, [], "same"), "longer")
    proxy = restarted(start_proxy, proxy, fake_engine)
    shorter = played(proxy, [], "same")
    played(proxy, longer, "end of the longer")
    played(proxy, shorter, "end of the shorter")
    assert sorted(sessions_of(proxy).values()) == [
        ["same", "end of the shorter"],
        ["same", "longer", "end of the longer"],
    ]


def test_a_conversation_is_never_found_with_another_key(database_url, two_keys, fake_engine, start_proxy):
    """Neither in memory nor in the store, although both keys are of one tenant."""
    mine, other = ({"authorization": f"Bearer {key}"} for key in two_keys)
    proxy = start_proxy(fake_engine.url, database_url=database_url)
    messages = played(proxy, [], "secret", **mine)
    played(proxy, messages, "mine", **mine)
    played(proxy, messages, "theirs", **other)
    proxy = restarted(start_proxy, proxy, fake_engine)
    played(proxy, messages, "mine again", **mine)
    played(proxy, messages, "theirs again", **other)
    assert sorted(sessions_of(proxy).values()) == [
        ["secret", "mine", "mine again"],
        ["theirs"],
        ["theirs again"],
    ]


def test_a_conversation_whose_session_has_ended_continues_in_a_new_session(fake_engine, start_proxy):
    """The client names no session, so an error would not help it; before and after a restart."""
    proxy = start_proxy(fake_engine.url)
    messages = played(proxy, [], "one")
    for text in ("two", "three"):
        (newest, *_) = httpx2.get(f"{proxy.url}/v1/sessions").json()["data"]
        httpx2.post(f"{proxy.url}/v1/sessions/{newest['session_id']}/end", json={}).raise_for_status()
        messages = played(proxy, messages, text)
        proxy = restarted(start_proxy, proxy, fake_engine)
    assert sorted(sessions_of(proxy).values()) == [["one"], ["three"], ["two"]]


def test_a_session_that_expires_is_forgotten_at_once(fake_engine, start_proxy):
    """Its conversation continues in a new session; a call that names the expired one is refused and not sampled."""
    proxy = start_proxy(fake_engine.url, "--session-idle-seconds", "0.5")
    messages = played(proxy, [], "one")
    (held,) = httpx2.get(f"{proxy.url}/v1/sessions").json()["data"]
    held_url = f"{proxy.url}/v1/sessions/{held['session_id']}"
    wait_until(lambda: httpx2.get(held_url).json()["status"] == "expired", "the session is expired")
    body = {"model": "fake", "messages": [*messages, user("two")]}
    named = httpx2.post(f"{proxy.session_v1(held['session_id'])}/chat/completions", json=body)
    assert (named.status_code, named.json()["error"]["code"]) == (409, "session_not_open")
    played(proxy, messages, "two")
    assert sorted(sessions_of(proxy).values()) == [["one"], ["two"]]


def set_back(proxy: RunningProxy, interval: timedelta) -> None:
    database = Database(proxy.database_url)
    earlier = sa.update(sessions).values(
        last_active_at=sessions.c.last_active_at - interval // timedelta(microseconds=1)
    )
    with database.write() as connection:
        connection.execute(earlier)
    database.close()


def test_a_session_that_no_call_names_is_over_ten_minutes_after_its_reward(fake_engine, start_proxy):
    """A client that only posts rewards need not end it: its group is ready. Others stay open for an hour."""
    proxy = start_proxy(fake_engine.url)
    rewarded = call(proxy, [user("rewarded")])
    played(proxy, [], "no reward")
    named = httpx2.post(f"{proxy.session_v1('named')}/chat/completions", json={"model": "f", "messages": [user("c")]})
    later = call(proxy, [user("rewarded later")])
    set_back(proxy, timedelta(minutes=11))
    for reply in (rewarded, named.json()):
        httpx2.post(f"{proxy.v1}/rewards", json={"turn_id": reply["id"], "value": 1.0}).raise_for_status()
    set_back(proxy, timedelta(minutes=11))
    httpx2.post(f"{proxy.v1}/rewards", json={"turn_id": later["id"], "value": 1.0}).raise_for_status()
    counts = f"{proxy.v1}/counts"
    wait_until(lambda: httpx2.get(counts).json()["sessions"] == {"open": 3, "ended": 1}, "one session is over")
    assert httpx2.get(counts).json()["groups"] == {"open": 3, "ready": 1}


def test_parallel_rollouts_with_equal_replies_stay_in_separate_sessions(proxy):
    """Their second calls are concurrent. A third call with the same conversation is ambiguous: a new session."""
    conversations = [played(proxy, [], "same") for _ in range(6)]
    with ThreadPoolExecutor(6) as agents:
        list(agents.map(lambda messages: played(proxy, messages, "on"), conversations))
    assert list(sessions_of(proxy).values()) == [["same", "on"]] * 6
    played(proxy, conversations[0], "again")
    assert sorted(sessions_of(proxy).values()) == [["again"], *[["same", "on"]] * 6]
    assert {view.turn.outcome.value for view in proxy.turns()} == {"exact"}


def test_a_first_call_that_is_repeated_after_an_error_stays_in_its_session(fake_engine, proxy):
    """One repetition finds it: parallel rollouts, whose requests are equal, stay apart."""
    fake_engine.fail_next(Fault(kind="status", status=429, count=2))

    def status(_: int) -> int:
        return httpx2.post(
            f"{proxy.v1}/chat/completions", json={"model": "fake", "messages": [user("same")]}
        ).status_code

    assert [status(attempt) for attempt in range(2)] == [429, 429]
    with ThreadPoolExecutor(4) as agents:
        assert list(agents.map(status, range(4))) == [200] * 4
    outcomes: dict[str, list[str]] = {}
    for view in proxy.turns():
        outcomes.setdefault(view.turn.session_id, []).append(view.turn.outcome.value)
    assert sorted(outcomes.values()) == [["error", "error", "exact"], *[["exact"]] * 3]


@pytest.mark.parametrize("restarts", [False, True])
def test_tool_call_ids_distinguish_equal_runs(fake_engine, start_proxy, restarts):
    """Each run continues in its own session, also where another run has an equal turn without children."""
    fake_engine.answer(Rule(contains="look", reply=Reply(tool_calls=[ToolCall(name="look_up", arguments={})])))
    proxy = start_proxy(fake_engine.url)
    runs = [played(proxy, [], "look", TOOLS) for _ in range(2)]
    for messages in runs:
        (asked,) = messages[-1]["tool_calls"]
        messages.append({"role": "tool", "tool_call_id": asked["id"], "content": "42"})
    for text in ("a", "b"):
        if restarts:
            proxy = restarted(start_proxy, proxy, fake_engine)
        played(proxy, runs[0], text, TOOLS)
    played(proxy, runs[1], "c", TOOLS)
    assert sorted(sessions_of(proxy).values()) == [["look", "a", "b"], ["look", "c"]]


def test_a_handoff_stays_in_its_session_with_its_reason(proxy):
    """Another agent takes the conversation over: with another system message, and with other tools."""
    messages = played(proxy, [{"role": "system", "content": "You sort."}], "one")
    messages = played(proxy, [{"role": "system", "content": "You help."}, *messages[1:]], "two")
    messages = played(proxy, messages, "three", TOOLS)
    played(proxy, messages, "four", TOOLS)
    assert list(sessions_of(proxy).values()) == [["one", "two", "three", "four"]]
    found = [(view.turn.reason, view.turn.parent_turn_id is None) for view in proxy.turns()]
    assert found == [(None, True), ("system_changed", True), ("tools_changed", True), (None, False)]
    for reason in ("system_changed", "tools_changed"):
        assert metric(proxy, "turnwise_chain_breaks_total", reason=reason) == 1


def test_equal_conversations_that_go_on_differently_stay_apart_where_no_turn_can_be_extended(fake_engine, start_proxy):
    """As at a proxy that does not know the template: the calls start new chains, but their sessions have been taken."""
    proxy = start_proxy(fake_engine.url, "--no-continuation")
    runs = [played(proxy, [], "hi") for _ in range(2)]
    assert runs[0] == runs[1]
    for text in ("a", "b"):
        played(proxy, runs[0], text)
    assert sorted(sessions_of(proxy).values()) == [["hi", "a"], ["hi", "b"]]


def test_an_agent_that_cuts_its_history_stays_in_its_session_by_the_ids_of_its_calls(fake_engine, proxy):
    """It drops its first messages. A call whose id two sessions sampled names none of them."""
    fake_engine.answer(Rule(contains="look", reply=Reply(tool_calls=[ToolCall(name="look_up", arguments={})])))
    runs = [played(proxy, [], f"look at {name}", TOOLS) for name in ("the sky", "the sea")]
    cut = [
        [{"role": "user", "content": "Go on."}, run[-1], {"role": "tool", "tool_call_id": call_id, "content": "42"}]
        for run in runs
        for call_id in [run[-1]["tool_calls"][0]["id"]]
    ]
    for messages, text in zip(cut, ("up", "down"), strict=True):
        played(proxy, messages, text, TOOLS)
    assert sorted(sessions_of(proxy).values()) == [["look at the sea", "down"], ["look at the sky", "up"]]


SAID = (
    "alpha is mended, and beta still lacks its mocked clock",
    "alpha is broken, and gamma has not been looked at yet",
)


def test_a_context_that_a_summary_begins_stays_in_the_session_of_the_summary(fake_engine, proxy):
    """It has nothing else of it: no message, no id. The summary was asked for in the chain, or with the text alone."""
    prompts = "Summarize our conversation so far.", "Create a clear and complete summary of the entire conversation"
    fake_engine.state.script.rules[:] = [
        *(Rule(contains=prompt, reply=Reply(text=said)) for prompt, said in zip(prompts, SAID, strict=True)),
        Rule(reply=Reply(text="Done.")),
    ]
    in_chain = played(proxy, played(proxy, [], "Mend alpha."), prompts[0])
    beside = played(proxy, [], f"{prompts[1]}: Mend alpha. Done.")
    for said in SAID:
        call(proxy, [user(f"So far: {said}\nGo on.")])
    call(proxy, [user("Something else: nothing of it was said before.")])
    found = sorted(sessions_of(proxy).values(), key=len)
    assert [len(each) for each in found] == [1, 2, 3]
    assert in_chain[-1]["content"] in found[2][-1]
    assert beside[-1]["content"] in found[1][-1]


def test_equal_summaries_of_parallel_rollouts_are_gone_on_from_in_a_session_each(fake_engine, proxy):
    prompt = "Summarize our conversation so far."
    fake_engine.state.script.rules[:] = [
        Rule(contains=prompt, reply=Reply(text=SAID[0])),
        Rule(reply=Reply(text="Done.")),
    ]
    played(proxy, played(proxy, [], "Mend alpha."), prompt)
    played(proxy, played(proxy, played(proxy, [], "Mend alpha, please."), "Now."), prompt)
    for expected in ([2, 4], [3, 4], [1, 3, 4]):
        call(proxy, [user(f"So far: {SAID[0]}")])
        assert sorted(map(len, sessions_of(proxy).values())) == expected, "the newest one first"
