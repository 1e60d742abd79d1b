"""Token budgets of keys and tenants. The fake engine echoes: one call of `CHAT` uses the same tokens every time."""

from typing import Any

from fastapi.testclient import TestClient
from support.commands import invoke
from support.in_process import in_process_proxy
from support.waiting import wait_until

from proxy import auth
from proxy.features.limits import budgets
from proxy.writer.client import Writer
from turnwise.client.wire import error_of
from turnwise.errors import BudgetSpent, StoreUnavailable
from turnwise.features import limits
from turnwise.store import keys
from turnwise.store.database import Database
from turnwise.types import utc_now

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def make_key(database: Database, tenant: str = "acme", role: str = "agent", **options: Any) -> str:
    with database.write() as connection:
        return keys.create_key(connection, tenant, keys.KeyRole(role), "", **options)[1]


def ask(http: TestClient, key: str, path: str = "/v1/chat/completions") -> Any:
    return http.post(path, json=CHAT, headers={"authorization": f"Bearer {key}"})


def get(http: TestClient, key: str, path: str) -> Any:
    return http.get(path, headers={"authorization": f"Bearer {key}"}).json()


def used(reply: Any) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["total_tokens"])


def test_a_key_with_a_budget_is_refused_once_it_is_spent_and_other_keys_are_not(tmp_path):
    """The call that spends the budget still ends. The refusal tells SDKs not to retry, and our client its class."""
    with in_process_proxy(tmp_path) as (http, database):
        limited, free = make_key(database, token_budget=1), make_key(database)
        assert get(http, limited, "/v1/budget")["key"] == {"token_budget": 1, "tokens_used": 0}
        cost = used(ask(http, limited))
        refused = ask(http, limited)
        assert refused.status_code == 429
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "token_budget_spent")
        assert f"is spent: {cost} of 1 tokens in all" in error["message"]
        assert isinstance(error_of(429, refused.content), BudgetSpent)
        assert get(http, limited, "/v1/budget") == {
            "key": {"token_budget": 1, "tokens_used": cost},
            "tenant": {"token_budget": None, "tokens_used": cost},
            "days": None,
        }
        assert (
            'turnwise_limited_total{limit="key_budget"} 1.0'
            in http.get("/metrics", headers={"authorization": f"Bearer {free}"}).text
        )
        used(ask(http, free))
        listed = get(http, make_key(database, role="admin"), "/v1/keys")["data"]
        assert [(key["token_budget"], key["tokens_used"]) for key in listed[:2]] == [(1, cost), (None, 0)]


def test_a_budget_survives_a_restart(tmp_path):
    with in_process_proxy(tmp_path, tenant_token_budget=1) as (http, database):
        key, other = make_key(database), make_key(database, tenant="other")
        cost = used(ask(http, key))
    with in_process_proxy(tmp_path, tenant_token_budget=1) as (http, database):
        message = ask(http, key).json()["error"]["message"]
        assert f"the token budget of tenant 'acme' is spent: {cost} of 1 tokens" in message
        used(ask(http, other))


def test_the_tokens_of_a_failed_write_count_and_are_stored_with_the_next_one(tmp_path, monkeypatch):
    async def fail(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("locked")

    with in_process_proxy(tmp_path, tenant_token_budget=1) as (http, database):
        key = make_key(database)
        with monkeypatch.context() as broken:
            broken.setattr(budgets, "READ_SECONDS", -1.0)
            broken.setattr(Writer, "do", fail)
            cost = used(ask(http, key))
            failed = 'turnwise_background_errors_total{task="budgets"} 1.0'
            headers = {"authorization": f"Bearer {key}"}
            wait_until(lambda: failed in http.get("/metrics", headers=headers).text, "the write has failed")
            assert ask(http, key).status_code == 429
            used(ask(http, make_key(database, tenant="other")))
    with in_process_proxy(tmp_path, tenant_token_budget=1) as (http, database):
        assert get(http, key, "/v1/budget")["tenant"]["tokens_used"] == cost


def test_the_calls_of_a_session_key_are_charged_to_the_key_that_created_the_session(tmp_path):
    with in_process_proxy(tmp_path, key_token_budget=1) as (http, database):
        key, other = make_key(database), make_key(database)
        made = http.post("/v1/sessions", json={"session_id": "s"}, headers={"authorization": f"Bearer {key}"}).json()
        used(ask(http, made["api_key"], "/sessions/s/v1/chat/completions"))
        for spent in (made["api_key"], key):
            assert ask(http, spent).json()["error"]["code"] == "token_budget_spent"
        used(ask(http, other))


def test_counted_tokens_and_forks_are_charged_and_refused_like_calls(tmp_path):
    """A fork is charged with what it copies: the prompt and the reply, which is what its call was charged with."""
    with in_process_proxy(tmp_path, key_token_budget=10**6) as (http, database):
        key = make_key(database)
        spent = lambda: get(http, key, "/v1/budget")["key"]["tokens_used"]  # noqa: E731
        headers = {"authorization": f"Bearer {key}"}
        first = ask(http, key)
        cost = used(first)
        forked = http.post(f"/v1/turns/{first.json()['id']}/fork", headers=headers)
        assert (forked.status_code, spent()) == (200, 2 * cost)
        counted = ask(http, key, "/v1/messages/count_tokens").json()["input_tokens"]
        assert counted > 0
        assert spent() == 2 * cost + counted
    with in_process_proxy(tmp_path, key_token_budget=1) as (http, database):
        assert ask(http, key, "/v1/messages/count_tokens").status_code == 429
        assert ask(http, key, "/v1beta/models/fake:countTokens").status_code == 429
        refused = http.post(f"/v1/turns/{first.json()['id']}/fork", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "token_budget_spent")


def test_a_prompt_that_cannot_fit_is_charged_with_the_least_tokens_that_it_has(tmp_path):
    """Refusing it costs its reading, so it may not be free; the fake engine's context has 32,768 tokens."""
    with in_process_proxy(tmp_path, key_token_budget=10**9) as (http, database):
        key = make_key(database)
        headers, path = {"authorization": f"Bearer {key}"}, "/sessions/s/v1/chat/completions"
        first = ask(http, key, path)
        reply = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
        long = {"role": "user", "content": "".join(map(str, range(10**6)))}
        refused = http.post(path, json={**CHAT, "messages": [*CHAT["messages"], reply, long]}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert get(http, key, "/v1/budget")["key"]["tokens_used"] > used(first) + 32_000


def test_counted_tokens_and_forks_count_for_rates(tmp_path):
    with in_process_proxy(tmp_path, key_requests_per_minute=2) as (http, database):
        key = make_key(database)
        headers = {"authorization": f"Bearer {key}"}
        turn_id = ask(http, key).json()["id"]
        assert ask(http, key, "/v1/messages/count_tokens").status_code == 200
        assert ask(http, key, "/v1/messages/count_tokens").status_code == 429
        assert http.post(f"/v1/turns/{turn_id}/fork", headers=headers).status_code == 429


def test_with_a_period_only_its_days_count_and_the_reply_states_when_to_retry(tmp_path):
    """Two days: yesterday counts, the day before it does not."""
    with in_process_proxy(tmp_path, tenant_token_budget=100, token_budget_days=2) as (http, database):
        key, today = make_key(database), limits.day_of(utc_now())
        with database.write() as connection:
            limits.add_usage(connection, {("acme", "k", today - 2): 1000})
        used(ask(http, key))
        with database.write() as connection:
            limits.add_usage(connection, {("acme", "k", today - 1): 100})
    with in_process_proxy(tmp_path, tenant_token_budget=100, token_budget_days=2) as (http, database):
        refused = ask(http, key)
        assert "tokens in the last 2 days (UTC); wait for 00:00 UTC" in refused.json()["error"]["message"]
        assert 0 < int(refused.headers["retry-after"]) <= 86_400


def test_the_tokens_of_a_key_without_a_budget_are_counted_and_a_budget_is_set_and_raised_by_a_command(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(budgets, "READ_SECONDS", -1.0)
    monkeypatch.setattr(auth, "CACHE_SECONDS", 0.05)
    with in_process_proxy(tmp_path) as (http, database):
        key, admin = make_key(database), make_key(database, role="admin")
        cost = used(ask(http, key)) + used(ask(http, key))
        listed = lambda: get(http, admin, "/v1/keys")["data"][0]  # noqa: E731
        wait_until(lambda: listed()["tokens_used"] == cost, "both calls are counted")
        place = ("--database", f"sqlite:///{tmp_path}/turnwise.db")
        command = ("keys", "budget", listed()["key_id"])
        assert invoke(*command, "1", *place).exit_code == 0
        wait_until(lambda: ask(http, key).status_code == 429, "the budget holds for a key that is in use")
        message = ask(http, key).json()["error"]["message"]
        assert f"raise it with `turnwise keys budget {listed()['key_id']} TOKENS`" in message
        assert invoke(*command, str(10 * cost), *place).exit_code == 0
        used(ask(http, key))
