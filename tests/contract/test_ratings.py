"""Ratings over REST and the client: who is asked, what a rating becomes, and what the asked say of a version."""

import httpx2
import pytest
from support.proxies import RunningProxy

from turnwise.client import Client
from turnwise.errors import Conflict, InvalidRequest


@pytest.fixture
def proxy(empty_proxy: RunningProxy) -> RunningProxy:
    return empty_proxy


def call(base_url: str, text: str = "Where is Kim?") -> str:
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
    return httpx2.post(f"{base_url}/chat/completions", json=body).raise_for_status().json()["id"]


def play(client: Client, *names: str) -> None:
    for name in names:
        call(client.create_session(session_id=name).base_url)
        client.end_session(name)


def test_a_person_is_asked_about_each_session_once_and_the_rating_is_its_reward(proxy):
    with Client(proxy.url) as client:
        play(client, "a", "b", "c")
        client.create_session(session_id="a", metadata={"scores": {"judge": 0.8}})  # no reward, so it is drawn
        first = client.next_rating(rater="ann")
        assert (first["probability"], first["num_candidates"], first["policy_version"]) == (1 / 3, 3, 0)
        assert client.next_rating(rater="ann")["session_id"] == first["session_id"]
        other = client.next_rating(rater="ben")
        assert other["session_id"] != first["session_id"]
        for _ in range(2):  # a lost answer is asked for again
            assert client.rate(first["session_id"], True)["rating"] == 1.0
        (line,) = client.session(first["session_id"])["rewards"]
        assert (line["value"], line["source"]) == (1.0, "asked")
        client.rate(other["session_id"], 0.25)
        last = client.next_rating(rater="ann")
        client.rate(last["session_id"], comment="It was the other Kim.")
        assert client.next_rating(rater="ann")["session_id"] is None
        rewards = {name: client.session(name)["reward"] for name in "abc"}
        assert rewards == {first["session_id"]: 1.0, other["session_id"]: 0.25, last["session_id"]: 0.0}
        said = [(each["kind"], each["value"]) for each in client.feedback_of(last["session_id"])]
        assert said == [("comment", "It was the other Kim."), ("boolean", False)]
        assert [client.session(name)["rating"] for name in "abc"] == ["rated"] * 3
        summary = client.ratings()
        counts = {name: summary[name] for name in ("num_rated", "num_volunteered", "num_unrated", "missing")}
        assert counts == {"num_rated": 3, "num_volunteered": 0, "num_unrated": 0, "missing": 7}
        (version,) = summary["versions"]
        assert version["mean"] == pytest.approx(1.25 / 3)
        assert version["low"] < version["mean"] < version["high"]


def test_a_rater_who_cannot_say_leaves_the_session_to_another_one(proxy):
    with Client(proxy.url) as client:
        play(client, "a")
        assert client.next_rating(rater="ann")["session_id"] == "a"
        client.rate("a", skip=True)
        assert client.next_rating(rater="ann")["session_id"] is None
        assert client.next_rating(rater="ben")["session_id"] == "a"


def test_the_better_of_a_pair_is_a_demonstration_beside_the_rating(proxy):
    with Client(proxy.url) as client:
        session = client.create_session(session_id="a")
        first = call(session.base_url)
        turn = next(client.turns("a"))
        messages = [*turn["messages"], turn["response"], {"role": "user", "content": "And Jo?"}]
        body = {"model": "fake", "messages": messages}
        second = httpx2.post(f"{session.base_url}/chat/completions", json=body).raise_for_status().json()["id"]
        client.end_session("a")
        assert client.next_rating()["pair"] is None
        fork = client.fork(second, at="before", session_id="f")
        again = httpx2.post(f"{fork.base_url}/chat/completions", json=body).raise_for_status().json()["id"]
        pair = client.next_rating()["pair"]
        assert pair == {"turn_id": second, "other_turn_id": again, "other_session_id": "f"}
        client.rate("a", True, better=again, over=second)
        (chosen,) = client.feedback_of("f")
        assert (chosen["turn_id"], chosen["over"], chosen["source"]) == (again, [second], "asked")
        assert first != second


def test_what_nobody_was_asked_about_and_what_says_nothing_is_refused(proxy):
    with Client(proxy.url) as client:
        play(client, "a")
        with pytest.raises(Conflict, match="nobody was asked about session 'a'"):
            client.rate("a", True)
        client.next_rating()
        for said in ({}, {"value": True, "skip": True}, {"value": True, "better": "t"}, {"comment": ""}):
            with pytest.raises(InvalidRequest):
                client.rate("a", **said)
        for value, message in {"good": "a text is a `comment`", 1e9: "is no number from -1e6 to 1e6"}.items():
            with pytest.raises(InvalidRequest, match=message):
                client.rate("a", value)
        assert client.session("a")["rating"] == "asked"


def test_no_session_key_is_asked_about_other_sessions(proxy):
    with Client(proxy.url) as client:
        play(client, "a")
        key = client.create_session(session_id="b", key_may="call_and_reward").api_key
    headers = {"authorization": f"Bearer {key}"}
    assert httpx2.get(f"{proxy.url}/v1/ratings/next", headers=headers).status_code == 403
    refused = httpx2.post(f"{proxy.url}/v1/ratings", json={"session_id": "a", "value": True}, headers=headers)
    assert refused.status_code == 403
