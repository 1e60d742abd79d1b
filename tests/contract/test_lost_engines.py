"""A call whose engine is killed is sampled anew by another one, unless its client has begun to get a reply."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from types import SimpleNamespace

import pytest
from support.in_process import served
from support.migrated import migrated
from support.ports import free_port
from support.waiting import wait_until
from turnwise_fake_engine import Fault, FaultKind, Reply, Rule, running_fake_engine

from proxy import features
from proxy.calls import relay
from proxy.engines.pool import EnginePool
from turnwise.errors import Conflict

CHAT = "/sessions/s/v1/chat/completions"
TEXT = "Which river is the longest?"
BODY = {"model": "fake", "max_tokens": 64, "messages": [{"role": "user", "content": TEXT}]}


@pytest.fixture(autouse=True)
def no_health_checks(monkeypatch):
    """Let calls find that an engine is lost, before a check does."""
    monkeypatch.setattr("proxy.reload.driver.HEALTH_SECONDS", 3600.0)


@contextlib.contextmanager
def fleet(directory, number, **settings):
    """Serve with stand-ins that were not called yet, the first of which gets the calls of session `s`."""
    from support.warm_writers import fork_writers

    fork_writers()
    with contextlib.ExitStack() as running:
        engines = [running.enter_context(running_fake_engine()) for _ in range(number)]
        url = migrated(f"sqlite:///{directory}/turnwise.db")
        given = features.Settings(engine=[each.url for each in engines], database=url, **settings)
        http = running.enter_context(served(given, routes=features.ROUTES, features=features.served()))
        wait_until(lambda: len(ready(http)) == number, "all engines serve")
        http.post(CHAT, json=BODY).raise_for_status()
        engines.sort(key=lambda each: not asked_of(each))
        for each in engines:
            each.calls.clear()
        yield http, engines


def ready(http):
    return [each["url"] for each in http.get("/readyz").json()["engines"] if each["ready"]]


def asked_of(engine):
    return [call for call in engine.calls if TEXT in json.dumps(call.body)]


def moved(http):
    found = [line for line in http.get("/metrics").text.splitlines() if 'retries_total{what="engine"}' in line]
    return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def cost_of_session(http):
    return Decimal(http.get("/v1/sessions/s").json()["cost"]["USD"])


def last_turns(http):
    """Return the turns after the first one, which chose the engine."""
    return http.get("/v1/sessions/s/turns").json()["data"][1:]


@pytest.mark.parametrize("when", ["before it is sent", "in the queue", "after the head of the answer"])
@pytest.mark.parametrize(
    ("path", "stream"),
    [(CHAT, False), (CHAT, True), ("/sessions/s/v1/messages", True), ("/sessions/s/v1/responses", True)],
)
def test_a_call_whose_engine_is_killed_is_sampled_anew_by_another_and_stored_once(tmp_path, path, stream, when):
    body = BODY | {"stream": stream} | ({"input": TEXT} if "responses" in path else {})
    with fleet(tmp_path, 3) as (http, (lost, *others)), ThreadPoolExecutor(1) as pool:
        lost.answer(Rule(contains=TEXT, reply=Reply(text="never sent", pace_seconds=3600.0)))
        if when == "in the queue":
            lost.state.running.clear()
        if when == "before it is sent":
            lost.kill()
        reply = pool.submit(http.post, path, json=body)
        if when != "before it is sent":
            wait_until(lambda: asked_of(lost), "the engine has the call")
            wait_until(lambda: "head" not in when or asked_of(lost)[0].versions, "it has sent the head")
            lost.kill()
        assert reply.result().status_code == 200
        (turn,) = last_turns(http)
        (call,) = [call for each in others for call in asked_of(each)]
        assert (turn["outcome"], turn["reason"], turn["token_ids"]) == ("exact", None, call.token_ids[0])
        assert reply.result().text.count(call.reply_id.partition("-")[2]) >= 1
        assert reply.result().text.count("event: message_start") == ("messages" in path)
        assert moved(http) == 1
        assert lost.url not in ready(http) or when != "before it is sent"


@pytest.mark.parametrize("has_the_call", [False, True], ids=["before it has the call", "with the call"])
def test_a_call_survives_an_engine_that_is_lost_with_its_own(tmp_path, monkeypatch, has_the_call):
    """A host is killed: its engines end one after the other."""
    with fleet(tmp_path, 3) as (http, (lost, second, other)), ThreadPoolExecutor(1) as pool:
        pausing, order = asyncio.sleep, [lost.url, second.url, other.url]

        async def second_goes_too(seconds):
            if seconds == relay.LOST_TOGETHER_SECONDS:
                second.kill()
            await pausing(0)

        monkeypatch.setattr(relay, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": second_goes_too}))
        monkeypatch.setattr(
            EnginePool, "_choose", lambda _, __, engines: min(engines, key=lambda e: order.index(e.url))
        )
        second.answer(Rule(contains=TEXT, reply=Reply(text="never sent", pace_seconds=3600.0)))
        if has_the_call:  # its first engine takes no connection any more
            lost.kill()
        else:
            lost.fail_next(Fault(kind=FaultKind.RESET, count=2, contains=TEXT))  # a kept connection is opened anew
        reply = pool.submit(http.post, CHAT, json=BODY)
        if has_the_call:
            wait_until(lambda: asked_of(second), "the second engine has the call")
            second.kill()
        assert reply.result().status_code == 200
        assert (len(asked_of(second)), moved(http)) == (has_the_call, 2)


def test_a_moved_call_pays_for_the_seconds_of_the_engine_that_answers_and_so_do_later_ones(tmp_path):
    with fleet(tmp_path, 2, prices={"*": {"engine_second": 1}}) as (http, (lost, other)), ThreadPoolExecutor(1) as pool:
        costs = [cost_of_session(http)]
        lost.answer(Rule(contains=TEXT, reply=Reply(text="never sent", pace_seconds=3600.0)))
        other.answer(Rule(contains=TEXT, reply=Reply(text="a reply", pace_seconds=0.001)))
        reply = pool.submit(http.post, CHAT, json=BODY)
        wait_until(lambda: asked_of(lost), "the engine has the call")
        lost.kill()
        assert reply.result().status_code == 200
        costs.append(cost_of_session(http))
        http.post(CHAT, json=BODY).raise_for_status()
        costs.append(cost_of_session(http))
    assert 0 < costs[0] < costs[1] < costs[2]


def test_a_stream_that_has_begun_is_not_begun_again(tmp_path):
    with fleet(tmp_path, 2) as (http, (lost, other)):
        lost.answer(Rule(contains=TEXT, reply=Reply(text="a long reply " * 50, pace_seconds=0.01)))
        with http.stream("POST", CHAT, json=BODY | {"stream": True}) as reply:
            lines = reply.iter_lines()
            assert any("a long" in json.dumps(line) or "a" in line for line in lines)
            lost.kill()
            assert "engine_unavailable" in "".join(lines)
        (turn,) = last_turns(http)
        assert (turn["outcome"], turn["reason"]) == ("aborted", "engine_broke_off")
        assert not asked_of(other)
        assert not moved(http)


def test_a_call_that_ends_each_engine_ends_two_of_them(tmp_path):
    with fleet(tmp_path, 3) as (http, engines):
        for each in engines:
            each.fail_next(Fault(kind=FaultKind.RESET, count=9, contains=TEXT))
        reply = http.post(CHAT, json=BODY)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert sum(bool(asked_of(each)) for each in engines) == 2
        assert [turn["outcome"] for turn in last_turns(http)] == ["error"]


def test_a_lost_call_whose_weights_no_other_engine_has_may_be_retried(tmp_path, monkeypatch):
    admit = EnginePool.admit

    async def refuse(*of, avoided=None, **options):
        if avoided is not None:
            raise Conflict("no other engine has it", code="version_not_loaded")
        return await admit(*of, **options)

    monkeypatch.setattr(EnginePool, "admit", refuse)
    with fleet(tmp_path, 2) as (http, (lost, other)):
        lost.fail_next(Fault(kind=FaultKind.RESET, count=2, contains=TEXT))  # a kept connection is opened anew
        reply = http.post(CHAT, json=BODY)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert http.post(CHAT, json=BODY).status_code == 200
        assert not asked_of(other)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.MALFORMED, FaultKind.NO_CHOICES])
def test_a_call_of_an_engine_that_answers_badly_or_not_in_time_is_sent_to_no_other(tmp_path, kind):
    with fleet(tmp_path, 2, engine_timeout_seconds=0.3) as (http, (bad, other)):
        bad.fail_next(Fault(kind=kind, contains=TEXT))
        assert http.post(CHAT, json=BODY).status_code in {502, 503}
        assert not asked_of(other)


def test_a_call_that_finds_the_port_of_its_only_engine_closed_waits_for_its_return(tmp_path):
    port = free_port()
    with running_fake_engine(port=port) as engine, ThreadPoolExecutor(1) as pool:
        given = features.Settings(engine=[engine.url], database=migrated(f"sqlite:///{tmp_path}/turnwise.db"))
        with served(given, routes=features.ROUTES, features=features.served()) as http:
            http.post(CHAT, json=BODY).raise_for_status()
            engine.kill()
            reply = pool.submit(http.post, CHAT, json=BODY)
            wait_until(lambda: not ready(http), "the call has found that")
            with running_fake_engine(port=port):
                assert reply.result().status_code == 200


def test_models_and_lengths_are_asked_of_another_engine_where_the_first_is_killed(tmp_path):
    with fleet(tmp_path, 3) as (http, (lost, other, _)):
        count = {"model": "fake", "messages": BODY["messages"], "tools": [{"name": "f", "input_schema": {}}]}
        expected = (
            http.get("/v1/models").json()["data"][0]["id"],
            http.post("/v1/messages/count_tokens", json=count).json(),
        )
        lost.kill()
        other.kill()
        found = (
            http.get("/v1/models").json()["data"][0]["id"],
            http.post("/v1/messages/count_tokens", json=count).json(),
        )
        assert found == expected
