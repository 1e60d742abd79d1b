"""Prices in the settings: what calls cost, by session, key, policy and update.

Each call here has P prompt tokens, 4 of them cached, and R sampled ones, at 0.30, 0.03 and 1.25 for a million.
"""

import json
import time
from decimal import Decimal

import httpx2
import pytest
from pydantic import ValidationError
from support.commands import invoke
from support.ledger_samples import finish, update_record
from turnwise_fake_engine import Script, running_fake_engine

from proxy.features import Settings
from proxy.features.prices import DividedTime
from turnwise.store import claims
from turnwise.store.database import Database

TABLE = {"prompt": 0.3, "cached": "0.03", "sampled": 1.25}
SAY = {"role": "user", "content": "Hello."}
BODY = {"model": "anything", "messages": [SAY]}


@pytest.fixture
def start_priced(start_proxy):
    with running_fake_engine(Script(cached_tokens=4)) as engine:
        yield lambda: start_proxy(engine.url, "--prices", json.dumps({"*": TABLE}), "--currency", "EUR")


@pytest.fixture
def priced(start_priced):
    return start_priced()


def cost_of(turn) -> Decimal:
    tokens = Decimal("0.3") * (turn.prompt_length - 4) + Decimal("0.03") * 4 + Decimal("1.25") * len(turn.token_ids)
    return tokens / 10**6


def cost_at(proxy, session: str) -> Decimal:
    [(currency, amount)] = httpx2.get(f"{proxy.url}/v1/sessions/{session}").json()["cost"].items()
    assert currency == "EUR"
    return Decimal(amount)


@pytest.mark.parametrize("n", [1, 3])
def test_a_whole_call_costs_its_prompt_once_and_all_that_was_sampled(priced, n):
    httpx2.post(f"{priced.session_v1('s')}/chat/completions", json=BODY | {"n": n}).raise_for_status()
    turns = [view.turn for view in priced.turns("s")]
    others = Decimal("1.25") * sum(len(turn.token_ids) for turn in turns[1:])
    assert cost_at(priced, "s") == cost_of(turns[0]) + others / 10**6


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("v1/chat/completions", BODY),
        ("v1/chat/completions", BODY | {"logprobs": True}),
        ("v1/chat/completions", BODY | {"stream_options": {"include_usage": True}}),
        ("v1/chat/completions", BODY | {"stream_options": {"include_usage": False, "continuous_usage_stats": True}}),
        ("v1/completions", {"model": "anything", "prompt": "Hello."}),
        ("v1/responses", {"model": "anything", "input": "Hello."}),
        ("v1/messages", BODY | {"max_tokens": 900}),
        ("v1beta/models/anything:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "Hello."}]}]}),
    ],
)
def test_a_stream_counts_cached_tokens_and_shows_usage_only_to_who_asked(priced, route, body):
    reply = httpx2.post(
        f"{priced.url}/sessions/s/{route}", json=body if "beta" in route else body | {"stream": True}
    ).raise_for_status()
    [view] = priced.turns("s")
    assert cost_at(priced, "s") == cost_of(view.turn)
    if route.endswith("completions"):
        assert ('"usage"' in reply.text) == body.get("stream_options", {}).get("include_usage", False)


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path}/turnwise.db"


def printed(url: str, *command: str) -> list:
    return json.loads(invoke(*command, "--database", url, "--json").stdout)


def test_costs_are_shown_by_session_key_policy_and_update_and_stay_with_the_key_of_a_deleted_session(start_priced, url):
    """Sessions a and b are of the first key, c of the second; one update trains a and c."""
    keys = [printed(url, "keys", "create") for _ in range(2)]
    admin = printed(url, "keys", "create", "--role", "admin")
    priced = start_priced()
    for key, session in zip([keys[0], keys[0], keys[1]], "abc", strict=True):
        head = {"authorization": f"Bearer {key['key']}"}
        httpx2.post(f"{priced.session_v1(session)}/chat/completions", json=BODY, headers=head)
    cost = cost_of(priced.turns("a")[0].turn)
    one, two, three = ({"EUR": f"{number * cost}"} for number in (1, 2, 3))
    database = Database(priced.database_url)
    for session in "ac":
        finish(database, session)
    held = claims.claim(database, "t", max_groups=9, lease_seconds=60)
    with database.write() as connection:
        claims.ack(connection, claims.Finished(held, update_record(1), trained={("default", "a"): {}}))
    database.close()
    head = {"authorization": f"Bearer {admin['key']}"}

    def read(path):
        return httpx2.get(f"{priced.url}/v1/{path}", headers=head).raise_for_status().json()

    assert [each["cost"] for each in read("sessions")["data"]] == [one] * 3
    by_key = {keys[0]["key_id"]: two, keys[1]["key_id"]: one, admin["key_id"]: {}}
    assert {each["key_id"]: each["cost"] for each in read("keys")["data"]} == by_key
    [policy] = read("policies?summary=true")["policies"]
    assert policy["summary"]["cost"] == three
    assert [each["cost"] for path in ("updates", "updates/summaries") for each in read(path)["data"]] == [two, two]

    assert [each["cost"] for each in printed(url, "sessions")] == [one] * 3
    assert {each["key_id"]: each["cost"] for each in printed(url, "keys", "list")} == by_key
    assert [each["summary"]["cost"] for each in printed(url, "policies", "list")] == [three]
    assert [each["cost"] for each in printed(url, "updates")] == [two]
    shown = invoke("updates", "--database", url).stdout.splitlines()
    assert (shown[0].split()[-1], shown[1].split()[-2:]) == ("cost", [f"{2 * cost}", "EUR"])

    httpx2.delete(f"{priced.url}/v1/sessions/a", headers=head).raise_for_status()
    assert {each["key_id"]: each["cost"] for each in read("keys")["data"]} == by_key
    assert [each["cost"] for each in read("sessions")["data"]] == [one] * 2
    httpx2.delete(f"{priced.url}/v1/tenant", headers=head).raise_for_status()
    assert printed(url, "policies", "list")[0]["summary"].get("cost") is None


def test_another_tenant_sees_its_own_costs_of_the_shared_policy_alone(start_priced, url):
    keys = {tenant: printed(url, "keys", "create", "--tenant", tenant, "--role", "admin") for tenant in ("one", "two")}
    priced = start_priced()
    for tenant, calls in (("one", 1), ("two", 2)):
        head = {"authorization": f"Bearer {keys[tenant]['key']}"}
        for number in range(calls):
            url = f"{priced.url}/sessions/{number}/v1/chat/completions"
            httpx2.post(url, json=BODY, headers=head).raise_for_status()
        [policy] = httpx2.get(f"{priced.url}/v1/policies?summary=true", headers=head).json()["policies"]
        assert policy["summary"]["cost"] == {"EUR": f"{calls * cost_of(priced.turns()[0].turn)}"}


def test_the_seconds_of_an_engine_are_divided_among_the_calls_that_run_in_them():
    """One call runs alone for 3 s, then beside another for 4 s, which goes on alone for 5 s: 3 + 2 and 2 + 5."""
    divided = DividedTime()
    now = iter([0.0, 3.0, 7.0, 12.0])
    starts, shares = {}, {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("proxy.features.prices.time.perf_counter", lambda: next(now))
        for begins, ends in (("first", None), ("second", None), (None, "first"), (None, "second")):
            call_share = divided.divide()
            if begins:
                starts[begins] = call_share
                divided.num_calls += 1
            if ends:
                shares[ends] = call_share - starts[ends]
                divided.num_calls -= 1
    assert shares == {"first": 5.0, "second": 7.0}


def test_the_narrowest_table_prices_a_call_and_engine_seconds_are_added(start_proxy):
    """A token is sampled each 20 ms; the engine's seconds are no more than the client's."""
    with running_fake_engine(Script(pace_seconds=0.02, model="served")) as engine:
        tables = {"*": {"prompt": 9}, f"engine:{engine.url}": {"prompt": 8}, "model:served": {"engine_second": 3600}}
        proxy = start_proxy(engine.url, "--prices", json.dumps(tables))
        started = time.monotonic()
        httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=BODY).raise_for_status()
        seconds = time.monotonic() - started
    [view] = proxy.turns("s")
    [(currency, amount)] = httpx2.get(f"{proxy.url}/v1/sessions/s").json()["cost"].items()
    assert currency == "USD"
    assert 3600 * 0.02 * (len(view.turn.token_ids) - 1) <= float(amount) <= 3600 * seconds


def test_without_prices_nothing_is_stored_or_shown(proxy):
    httpx2.post(f"{proxy.session_v1('s')}/chat/completions", json=BODY).raise_for_status()
    for path in ("sessions/s", "sessions", "keys", "policies?summary=true", "updates"):
        assert "cost" not in httpx2.get(f"{proxy.url}/v1/{path}").text
    assert "cost" not in invoke("sessions", "--database", proxy.database_url).stdout
    assert "cost" not in invoke("sessions", "--database", proxy.database_url, "--json").stdout


@pytest.mark.parametrize(
    "prices", [{"key:x": {"prompt": 1}}, {"*": {}}, {"*": {"prompt": -1}}, {"*": {"output": 1}}, {"*": {"prompt": "x"}}]
)
def test_a_table_that_prices_nothing_is_refused(prices):
    with pytest.raises(ValidationError):
        Settings(prices=prices)
