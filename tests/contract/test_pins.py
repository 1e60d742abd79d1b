"""Sampling that the operator pins, and greedy agents of which a share explores; what was asked for is stored beside."""

import json

import httpx2
import pytest
from support.ledger_samples import add_session, finish

from proxy.features import Settings
from proxy.features.pins import Pins
from turnwise.errors import SettingsError
from turnwise.features.arms import arms_since
from turnwise.store import selection
from turnwise.types import Session, Split

SAY = {"role": "user", "content": "Hello."}


def call(proxy, session: str, **sampling) -> dict:
    """Make a call; return the parameters that its turn has."""
    body = {"model": "fake", "messages": [SAY], **sampling}
    httpx2.post(f"{proxy.session_v1(session)}/chat/completions", json=body).raise_for_status()
    return proxy.turns(session)[-1].turn.sampling


def test_a_pin_replaces_what_a_call_asks_for_and_a_narrower_one_wins(start_proxy, fake_engine):
    pins = {"*": {"temperature": 1.0, "top_p": 1.0}, "tenant:default": {"temperature": 0.9}, "key:other": {"top_k": 3}}
    proxy = start_proxy(fake_engine.url, "--sampling-pins", json.dumps(pins))
    used = {"temperature": 0.9, "top_p": 1.0, "max_tokens": 9}
    assert call(proxy, "s", temperature=0, max_tokens=9) == used | {"asked": {"temperature": 0, "top_p": None}}
    sent = fake_engine.state.calls[-1].body
    assert {name: sent[name] for name in used} == used
    assert call(proxy, "same", temperature=0.9, top_p=1.0) == {"temperature": 0.9, "top_p": 1.0}
    httpx2.post(f"{proxy.url}/v1/sessions", json={"session_id": "own", "sampling": {"temperature": 0.7}})
    assert call(proxy, "own") == {"temperature": 0.7, "top_p": 1.0, "asked": {"temperature": None, "top_p": None}}


def test_a_call_without_a_session_id_gets_pins_and_is_continued_under_them(start_proxy, fake_engine):
    """The template prints one of the pinned parameters, so the conversation is looked for as it was stored."""
    pins = {"*": {"temperature": 0.9, "chat_template_kwargs": {"enable_thinking": False}}}
    proxy = start_proxy(fake_engine.url, "--sampling-pins", json.dumps(pins))
    body = {"model": "fake", "messages": [SAY], "temperature": 0}
    replied = httpx2.post(f"{proxy.v1}/chat/completions", json=body).raise_for_status().json()
    body["messages"] = [SAY, replied["choices"][0]["message"], SAY]
    httpx2.post(f"{proxy.v1}/chat/completions", json=body).raise_for_status()
    first, second = (view.turn for view in proxy.turns())
    for turn in (first, second):
        assert turn.sampling == pins["*"] | {"asked": {"temperature": 0, "chat_template_kwargs": None}}
    assert (second.session_id, second.parent_turn_id) == (first.session_id, first.turn_id)
    assert fake_engine.state.calls[-1].body["temperature"] == 0.9


def test_a_greedy_call_without_a_session_id_explores_and_its_counted_tokens_do_not(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url, "--explore", "1", "--explore-temperature", "0.8")
    body = {"model": "fake", "messages": [SAY], "temperature": 0, "max_tokens": 9}
    replied = httpx2.post(f"{proxy.v1}/chat/completions", json=body).raise_for_status().json()
    [view] = proxy.turns()
    assert (view.turn.sampling["temperature"], view.turn.sampling["explored"]) == (0.8, True)
    body["messages"] = [SAY, {"role": "assistant", "content": replied["choices"][0]["message"]["content"]}, SAY]
    httpx2.post(f"{proxy.v1}/messages/count_tokens", json=body).raise_for_status()
    assert "turnwise_explored_total 1.0" in httpx2.get(f"{proxy.url}/metrics").text


def test_a_session_knows_the_agent_that_opened_it(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url)
    named = {"by-call": "codex_cli_rs/0.1 (Linux)", "bare": "Pi"}
    for session, agent in named.items():
        body, headers = {"model": "fake", "messages": [SAY]}, {"user-agent": agent}
        httpx2.post(f"{proxy.session_v1(session)}/chat/completions", json=body, headers=headers).raise_for_status()
    httpx2.post(f"{proxy.v1}/sessions", json={"session_id": "by-api"}).raise_for_status()
    agents = [httpx2.get(f"{proxy.v1}/sessions/{name}").json()["agent"] for name in (*named, "by-api")]
    assert agents == ["codex_cli_rs", "Pi", None]


def test_of_the_four_pins_the_keys_wins_over_the_policys_the_tenants_and_the_proxys():
    pins = {"key:k": {"top_k": 4}, "policy:p": {"top_k": 3, "top_p": 0.3}, "*": {"top_k": 1, "min_p": 0.1}}
    pins["tenant:t"] = {"top_k": 2, "top_p": 0.2, "seed": 2}
    found = Pins(Settings(sampling_pins=pins), {7: "p"}.get)
    session = Session(session_id="s", tenant="t", policy_id=7)
    assert found.pinned(session, "k") == {"top_k": 4, "top_p": 0.3, "min_p": 0.1, "seed": 2}
    assert found.pinned(Session(session_id="s", tenant="u"), "l") == {"top_k": 1, "min_p": 0.1}


@pytest.mark.parametrize("pins", [{"default": {}}, {"*": {"n": 2}}, {"key:k": {"messages": []}}])
def test_a_pin_for_nobody_or_of_another_field_is_refused_at_the_start(pins):
    with pytest.raises((SettingsError, ValueError), match=r"pins for nobody|cannot be set for a whole session"):
        Settings(sampling_pins=pins)


def test_the_greedy_calls_of_the_exploring_sessions_are_sampled_at_a_temperature(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url, "--explore", "0.3", "--explore-temperature", "0.8")
    explored = 0
    for number in range(20):
        session = f"s{number}"
        is_drawn = selection.takes(-1, 0.3, Session(session_id=session))
        expected = (
            {"temperature": 0.8, "asked": {"temperature": 0}, "explored": True} if is_drawn else {"temperature": 0}
        )
        assert call(proxy, session, temperature=0) == expected
        assert call(proxy, session, temperature=0.5) == {"temperature": 0.5}
        shown = httpx2.get(f"{proxy.url}/v1/sessions/{session}").json()
        assert shown["explores"] == (0.8 if is_drawn else None)
        explored += is_drawn
    assert 0 < explored < 20
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    assert f"turnwise_explored_total {explored}.0" in metrics
    num_greedy = sum(
        view.turn.token_ids.size
        for number in range(20)
        for view in proxy.turns(f"s{number}")
        if view.turn.sampling["temperature"] == 0
    )
    assert f"turnwise_greedy_tokens_total {num_greedy}.0" in metrics


def test_an_exploring_call_has_no_seed_by_which_all_runs_of_its_task_would_sample_the_same(start_proxy, fake_engine):
    proxy = start_proxy(fake_engine.url, "--explore", "1")
    asked = {"temperature": 0, "seed": 7}
    assert call(proxy, "s", **asked) == {"temperature": 1.0, "seed": None, "asked": asked, "explored": True}
    assert fake_engine.state.calls[-1].body["seed"] is None
    assert call(proxy, "s", temperature=0.5, seed=7) == {"temperature": 0.5, "seed": 7}


def test_exploration_takes_its_share_of_train_sessions_and_no_other():
    pins = Pins(Settings(explore=0.1), lambda _: None)
    sessions = [Session(session_id=f"s{number}") for number in range(10_000)]
    drawn = [session for session in sessions if pins.opened(session).explores is not None]
    assert 0.09 <= len(drawn) / 10_000 <= 0.11
    held_out = [Session(session_id=session.session_id, split=Split.EVAL) for session in drawn]
    assert all(pins.opened(session).explores is None for session in held_out)
    assert Pins(Settings(), lambda _: None).opened(drawn[0]).explores is None


def test_versions_are_compared_without_the_sessions_that_explored(database):
    for name, explores in (("greedy", None), ("explored", 1.0)):
        session = add_session(database, name, explores=explores)
        finish(database, name, 1.0 if explores else 0.25)
    with database.read() as connection:
        newer, _ = arms_since(connection, session.created_at.replace(year=2000), (0, 99))
    assert (newer.num_sessions, newer.rewards) == (1, (0.25,))
