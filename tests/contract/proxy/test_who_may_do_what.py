"""Every route with every role, on own and foreign sessions of own and foreign tenants."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.in_process import in_process_proxy

from proxy import auth, features
from proxy.app import create_app
from proxy.auth import MAY, PHRASES
from turnwise.store import keys, versions
from turnwise.store.database import Database
from turnwise.types import PolicyVersion

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
ROLES = ("agent", "trainer", "admin")
ACTION_OF_ROUTE = create_app(routes=features.ROUTES).state.actions
WITHOUT_ACTION = {"GET /", "GET /healthz", "GET /readyz"}


class World:
    """A proxy with one key per role for each of two tenants, and two sessions with one turn in each tenant.

    One session of theirs may be trained.
    """

    def __init__(self, http: TestClient, database: Database) -> None:
        self.http = http
        self.keys: dict[tuple[str, str], str] = {}
        self.turns: dict[tuple[str, str], str] = {}
        with database.write() as connection:
            versions.adopt_base(connection, PolicyVersion(version=0, path="/no/model"))
        for tenant in ("mine", "theirs"):
            with database.write() as connection:
                for role in ROLES:
                    self.keys[tenant, role] = keys.create_key(connection, tenant, keys.KeyRole(role), "")[1]
            for session_id in (f"{tenant}-own", f"{tenant}-other"):
                for key_may, role in (("call", "session"), ("call_and_reward", "session_reward")):
                    body = {"session_id": session_id, "key_may": key_may}
                    made = self.ask("POST", "/v1/sessions", self.keys[tenant, "admin"], body)
                    if session_id.endswith("own"):
                        self.keys[tenant, role] = made.json()["api_key"]
                called = self.ask(
                    "POST", f"/sessions/{session_id}/v1/chat/completions", self.keys[tenant, "admin"], CHAT
                )
                self.turns[tenant, session_id] = called.json()["id"]
        admin = self.keys["theirs", "admin"]
        self.ask("POST", "/v1/rewards", admin, {"session_id": "theirs-other", "value": 1.0})
        self.ask("POST", "/v1/sessions/theirs-other/end", admin, {})
        assert "theirs-other" in self.ask("GET", "/v1/experiences", admin).text

    def ask(self, method: str, path: str, key: str, body: Mapping[str, Any] | None = None) -> Any:
        return self.http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})

    def call_route(self, route: str, key: str, session_id: str) -> Any:
        method, path = route.split(" ")
        path = path.replace("{session_id}", session_id).replace("{version}", "0").replace("{key_id}", "nobody")
        path = path.replace("{label}", "golden")
        (turn_id,) = (turn for (_, owner), turn in self.turns.items() if owner == session_id)
        path = path.replace("{turn_id}", turn_id)
        bodies: dict[str, Any] = {
            "POST /v1/sessions": {"session_id": "fresh"},
            "POST /v1/policies": {"path": "/nowhere"},
            "POST /v1/turns/{turn_id}/role": {"role": "main"},
        }
        body = bodies.get(route, {})
        if route == "POST /v1/rewards":
            body = {"session_id": session_id, "value": 1.0}
        if route == "POST /v1/feedback":
            body = {"session_id": session_id, "kind": "boolean", "value": True}
        if route == "GET /v1/feedback":
            path = f"{path}?session_id={session_id}"
        return self.ask(method, path, key, body if method == "POST" else None)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with in_process_proxy(tmp_path_factory.mktemp("world"), policy_tenant="mine") as (http, database):
        yield World(http, database)


def test_the_table_contains_every_route_and_every_action(world):
    paths = world.ask("GET", "/openapi.json", world.keys["mine", "admin"]).json()["paths"]
    documented = {
        f"{method.upper()} {path}"
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "calls" not in operation["tags"]
    }
    assert documented | {"GET /openapi.json"} == set(ACTION_OF_ROUTE) | (documented & WITHOUT_ACTION)
    assert set(ACTION_OF_ROUTE.values()) <= set(PHRASES)
    assert set().union(*MAY.values()) == set(PHRASES) == MAY["admin"]


@pytest.mark.parametrize("role", MAY)
@pytest.mark.parametrize("route", ACTION_OF_ROUTE)
def test_a_route_is_open_to_the_roles_that_the_table_names_and_to_their_tenant_alone(world, route, role):
    key, action = world.keys["mine", role], ACTION_OF_ROUTE[route]
    # An admin's deletion of its own tenant would end the test: see the last test.
    deletes = route.startswith("DELETE") and action in MAY[role]
    for session_id in ("theirs-own",) if deletes else ("mine-own", "mine-other", "theirs-own"):
        if deletes and "{session_id}" not in route:
            continue
        reply = world.call_route(route, key, session_id)
        if action not in MAY[role]:
            assert reply.status_code == 403, reply.text
            said = rf"An? {role.replace('_', ' ')} key cannot {re.escape(PHRASES[action])}\. Use an? .+ key\."
            assert re.fullmatch(said, reply.json()["error"]["message"])
            continue
        is_of_one_session = "{session_id}" in route or route in ("POST /v1/rewards", "POST /v1/feedback")
        if is_of_one_session and role == "session_reward" and session_id != "mine-own":
            assert reply.status_code == 403, reply.text  # a session key in another session
        elif (is_of_one_session or "{turn_id}" in route or route == "GET /v1/feedback") and session_id == "theirs-own":
            assert reply.status_code == 404, reply.text
        else:
            assert reply.status_code not in (401, 403), reply.text
            assert "theirs" not in reply.text.replace(session_id, "")


@pytest.mark.parametrize("role", MAY)
def test_model_calls_are_open_to_the_roles_that_may_call(world, role):
    key = world.keys["mine", role]
    reply = world.ask("POST", "/sessions/mine-other/v1/chat/completions", key, CHAT)
    is_refused = "call" not in MAY[role] or role.startswith("session")
    assert (reply.status_code == 403) == is_refused, reply.text
    if "call" in MAY[role]:
        # For this tenant the name is unknown: the call opens a session of that name in its own tenant.
        reply = world.ask("POST", "/sessions/theirs-other/v1/chat/completions", key, CHAT)
        assert reply.status_code == (403 if role.startswith("session") else 200)
    theirs = world.ask("GET", "/v1/sessions/theirs-other", world.keys["theirs", "admin"]).json()
    assert theirs["num_turns"] == 1  # no call of this tenant is in it


def test_a_turn_of_a_session_that_a_key_may_not_reward_is_unknown_and_so_is_that_session_in_a_header(world):
    """Another tenant's turn is, even where the caller has a session of the same name."""
    world.ask("POST", "/v1/sessions", world.keys["mine", "admin"], {"session_id": "theirs-other"})
    for of, session_id, role in (("mine", "mine-other", "session_reward"), ("theirs", "theirs-other", "admin")):
        line = {"turn_id": world.turns[of, session_id], "value": 1.0}
        assert world.ask("POST", "/v1/rewards", world.keys["mine", role], line).status_code == 404
    headers = {"authorization": f"Bearer {world.keys['mine', 'session']}", "x-session-id": "mine-other"}
    assert world.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 403


BAD_BODIES = (
    b"{",
    b'{"value": NaN}',
    b"[[[[",
    b'{"unknown": 1}',
    b'[{"value": "x"}]',
    b"[" * 5_000,
    b" " * (2**20 + 1),
)


@pytest.mark.parametrize("route", ACTION_OF_ROUTE)
def test_a_caller_without_a_key_gets_401_for_any_request(world, route):
    """The answer is 401 whatever the body, the query and the path hold."""
    method, path = route.split(" ")
    path = re.sub(r"{\w+}", "x" * 300, path)
    for body in BAD_BODIES if method in ("POST", "PUT") else (None,):
        for query in ("", "?unknown=1&limit=x"):
            reply = world.http.request(method, path + query, content=body, headers={"content-type": "application/json"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), (path, body)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages", "embeddings"])
def test_a_call_without_a_key_or_in_a_foreign_session_is_refused_before_its_body_is_read(world, path):
    for body in BAD_BODIES:
        sent = {"content": body, "headers": {"content-type": "application/json"}}
        assert world.http.post(f"/v1/{path}", **sent).status_code == 401
        sent["headers"]["authorization"] = f"Bearer {world.keys['mine', 'session']}"
        if path != "embeddings":
            assert world.http.post(f"/sessions/mine-other/v1/{path}", **sent).status_code == 403


@pytest.mark.parametrize(
    ("role", "route"),
    [
        ("session", "POST /v1/rewards"),
        ("agent", "POST /v1/policies"),
        ("trainer", "POST /v1/keys"),
        ("session_reward", "POST /v1/sessions/mine-other/end"),
        ("admin", "POST /v1/policies/0/activate"),
    ],
)
def test_a_key_that_may_not_use_a_route_gets_403_for_any_body(world, role, route):
    method, path = route.split(" ")
    tenant = "theirs" if "policies" in route else "mine"
    headers = {"content-type": "application/json", "authorization": f"Bearer {world.keys[tenant, role]}"}
    for body in BAD_BODIES:
        assert world.http.request(method, path, content=body, headers=headers).status_code == 403, body


@pytest.fixture(scope="module")
def beside_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, str]]:
    """A proxy whose only key is that of `turnwise up`, which has made the session `own`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "CACHE_SECONDS", 0.0)
        with in_process_proxy(tmp_path_factory.mktemp("up")) as (http, database):
            with database.write() as connection:
                key = keys.local_key(connection, None)
            assert http.post("/v1/sessions", json={"session_id": "own"}, headers=bearer(key)).status_code == 200
            yield http, key


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("sent", [{}, bearer("none"), bearer("tw-0123456789abcdef-" + 40 * "x")])
def test_an_agent_without_a_key_calls_the_model_and_can_do_nothing_else(beside_up, sent):
    """Not its own session's reward either, by its id or by that of a turn."""
    http, key = beside_up
    called = http.post("/sessions/own/v1/chat/completions", json=CHAT, headers=sent)
    assert called.status_code == 200
    assert http.get("/v1/models", headers=sent).status_code == 200
    bodies: dict[str, Any] = {
        "POST /v1/rewards": {"turn_id": called.json()["id"], "value": 1.0},
        "POST /v1/feedback": {"session_id": "own", "kind": "boolean", "value": True},
        "POST /v1/sessions": {"session_id": "more"},
    }
    for route in ACTION_OF_ROUTE:
        method, path = route.split(" ")
        path = path.replace("{session_id}", "own").replace("{turn_id}", called.json()["id"]).replace("{version}", "0")
        body = bodies.get(route, {}) if method in ("POST", "PUT") else None
        reply = http.request(method, re.sub(r"{\w+}", "x", path), json=body, headers=sent)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key"), route
    assert http.get("/v1/sessions/own", headers=bearer(key)).json()["reward"] is None


def test_the_key_of_up_rewards_and_its_sessions_key_calls(beside_up):
    http, key = beside_up
    made = http.post("/v1/sessions", json={"session_id": "graded"}, headers=bearer(key)).json()
    own = bearer(made["api_key"])
    assert http.post("/sessions/graded/v1/chat/completions", json=CHAT, headers=own).status_code == 200
    line = {"session_id": "graded", "value": 0.5}
    assert http.post("/v1/rewards", json=line, headers=own).status_code == 403
    assert http.post("/v1/rewards", json=line, headers=bearer(key)).status_code == 200


def test_only_the_tenant_that_owns_the_model_may_change_it(world):
    for tenant, status in (("theirs", 403), ("mine", 422)):
        reply = world.ask("POST", "/v1/policies", world.keys[tenant, "admin"], {"path": "/nowhere"})
        assert reply.status_code == status, reply.text
    refused = world.ask("POST", "/v1/policies/0/activate", world.keys["theirs", "admin"], {})
    assert "belongs to tenant 'mine', not 'theirs'" in refused.json()["error"]["message"]


def test_the_key_of_a_deleted_session_neither_brings_it_back_nor_works_in_one_of_its_name(tmp_path):
    with in_process_proxy(tmp_path, policy_tenant="mine") as (http, database):
        world = World(http, database)
        admin, own = world.keys["mine", "admin"], world.keys["mine", "session_reward"]
        assert world.ask("DELETE", "/v1/sessions/mine-own", admin).status_code == 200
        asked = [
            ("/v1/chat/completions", CHAT),
            ("/v1/messages/count_tokens", CHAT),
            ("/v1/rewards", {"session_id": "mine-own", "value": 1.0}),
            ("/v1/sessions/mine-own/end", {}),
        ]
        for _ in range(2):
            for path, body in asked:
                refused = world.ask("POST", path, own, body)
                assert (refused.status_code, "which was deleted" in refused.text) == (401, True), (path, refused.text)
            for path in ("/v1/models", "/v1/models/fake", "/v1beta/models", "/v1/responses/resp_x"):
                refused = world.ask("GET", path, own)
                assert (refused.status_code, "which was deleted" in refused.text) == (401, True), (path, refused.text)
            assert world.ask("POST", "/v1/embeddings", own, {}).status_code == 401
            listed = world.ask("GET", "/v1/sessions/mine-own", admin)
            assert listed.status_code == 404 or listed.json()["num_turns"] == 0
            world.ask("POST", "/v1/sessions", admin, {"session_id": "mine-own"})


def test_a_tenant_deletes_a_session_and_then_itself(tmp_path):
    with in_process_proxy(tmp_path, policy_tenant="mine") as (http, database):
        world = World(http, database)
        admin = world.keys["mine", "admin"]
        gone = {"num_sessions": 1, "num_turns": 1, "num_policies": 0}
        gone |= {
            key: []
            for key in (
                "policy_versions",
                "served_versions",
                "shaped_policies",
                "cloned_versions",
                "deleted_versions",
                "directories_left",
            )
        }
        assert world.ask("DELETE", "/v1/sessions/mine-own", admin).json() == gone
        assert world.ask("GET", "/v1/sessions/mine-own", admin).status_code == 404
        assert world.ask("DELETE", "/v1/tenant", admin).json() == gone
        assert world.ask("GET", "/v1/sessions", admin).status_code == 401
        listed = world.ask("GET", "/v1/sessions", world.keys["theirs", "admin"]).json()["data"]
        assert len(listed) == 2
