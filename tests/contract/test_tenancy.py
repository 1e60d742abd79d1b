"""Keys, roles and tenants of a real proxy: authentication, permissions, and isolation between tenants."""

import contextlib
import json
import random
import urllib.parse
from collections.abc import Iterator

import httpx2
import pytest
from support.commands import run_turnwise
from support.proxies import RunningProxy, running_proxy
from turnwise_fake_engine import running_fake_engine

NOTHING = {
    "sessions": {},
    "groups": {},
    "num_turns": 0,
    "num_rewards": 0,
    "num_ready_singles": 0,
    "num_failed_calls": 0,
    "num_updates": 0,
    "trainers": [],
}
MODEL_OF_FIRST = {"TURNWISE_PROXY_POLICY_TENANT": "first"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def turnwise(proxy_database: str, *arguments: str) -> dict:
    done = run_turnwise(*arguments, "--database", proxy_database, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def new_key(database: str, role: str, tenant: str) -> dict:
    return turnwise(database, "keys", "create", "--role", role, "--tenant", tenant, "--name", "test", "--yes")


class Tenant:
    def __init__(self, proxy: RunningProxy, key: str | None) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=proxy.url, headers=headers)

    def call(self, session_id: str) -> str:
        return self.http.post(f"/sessions/{session_id}/v1/chat/completions", json=CHAT).raise_for_status().json()["id"]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[tuple[RunningProxy, dict[str, Tenant]]]:
    """A proxy with keys: one per role of the first tenant, and an admin of a second."""
    directory = tmp_path_factory.mktemp("keyed")
    url = f"sqlite:///{directory}/turnwise.db"
    turnwise(url, "db", "upgrade")
    keys = {role: new_key(url, role, "first")["key"] for role in ("agent", "trainer", "admin")}
    keys["other"] = new_key(url, "admin", "second")["key"]
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, url, directory, environment=MODEL_OF_FIRST) as proxy,
        contextlib.ExitStack() as s,
    ):
        tenants = {name: Tenant(proxy, key) for name, key in keys.items()} | {"nobody": Tenant(proxy, None)}
        for tenant in tenants.values():
            s.enter_context(tenant.http)
        yield proxy, tenants


def test_a_second_tenant_cannot_read_anything_of_the_first(keyed):
    _, tenants = keyed
    first, other = tenants["admin"].http, tenants["other"].http
    first.post("/v1/sessions", json={"session_id": "mine", "task_id": "t", "group_id": "g"}).raise_for_status()
    turn_id = tenants["admin"].call("mine")
    for line in ({"turn_id": turn_id}, {"session_id": "mine"}, {"session_id": "mine", "step": 0}):
        assert other.post("/v1/rewards", json={**line, "value": 1.0}).status_code == 404
    assert other.get("/v1/sessions").json()["data"] == []
    counts = other.get("/v1/counts").json()
    del counts["counted_at"]
    assert counts == NOTHING
    assert other.get("/v1/sessions", params={"after": "mine"}).status_code == 404
    for query in ({"session_id": "mine"}, {"task_id": "t"}, {"group_id": "g"}, {}):
        assert other.get("/v1/experiences", params=query).content == b""
    assert other.post("/v1/sessions", json={"session_id": "mine"}).json()["num_turns"] == 0  # a new session
    assert first.get("/v1/sessions/mine").json()["num_turns"] == 1
    assert first.get("/v1/counts").json()["num_turns"] >= 1


def test_a_session_key_works_for_its_own_session_only(keyed):
    """It may call, reward and end its session; every other session and every list is refused."""
    proxy, tenants = keyed
    made = (
        tenants["agent"]
        .http.post("/v1/sessions", json={"session_id": "own", "key_may": "call_and_reward"})
        .raise_for_status()
        .json()
    )
    tenants["agent"].call("foreign")
    holder = Tenant(proxy, made["api_key"])
    with holder.http as http:
        turn_id = http.post("/v1/chat/completions", json=CHAT).raise_for_status().json()["id"]
        assert tenants["agent"].http.get(f"/v1/turns/{turn_id}").json()["session_id"] == "own"
        assert http.post("/v1/rewards", json={"turn_id": turn_id, "value": 1.0}).status_code == 200
        assert http.post("/sessions/foreign/v1/chat/completions", json=CHAT).status_code == 403
        assert http.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": "foreign"}).status_code == 403
        assert http.post("/v1/rewards", json={"session_id": "foreign", "value": 1.0}).status_code == 403
        foreign = tenants["agent"].call("foreign")
        assert http.post("/v1/rewards", json={"turn_id": foreign, "value": 1.0}).status_code == 404
        assert http.post("/v1/sessions/own/end", json={}).status_code == 200
        assert http.post("/v1/chat/completions", json=CHAT).json()["error"]["code"] == "session_not_open"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_the_proxy_refuses_to_listen_beyond_loopback(tmp_path, fake_engine, host):
    url = f"sqlite:///{tmp_path}/turnwise.db"
    turnwise(url, "db", "upgrade")
    done = run_turnwise("proxy", "--engine", fake_engine.url, "--database", url, "--host", host, "--port", "0")
    assert done.returncode != 0
    assert "turnwise keys create" in done.stderr


FRAGMENTS = [
    "' OR 1=1 --", '"; DROP TABLE turns; --', "../../etc/passwd", "..", "\x00", "%00", "\u202e", "{{7*7}}", "${jndi:x}",
    "\r\nX-Admin: 1", "a" * 5000, "*", "_%", "\ud7ff", "<script>", "tw-", "tws-", "tw--", "tws-.", "\\", "\x7f", "😀",
]  # fmt: skip


def payloads(count: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 3)))


def test_a_thousand_injections_are_answered_without_a_5xx(keyed):
    """In keys, ids and filters: each is refused with a 4xx or finds nothing; none authenticates, none causes a 5xx."""
    _, tenants = keyed
    http, statuses = tenants["admin"].http, []
    tenants["admin"].call("bystander")
    for number, text in enumerate(payloads(1000)):
        match number % 6:
            case 0:
                raw = text.encode().replace(b"\x00", b"").replace(b"\r\n", b"").replace(b"\x7f", b"")
                reply = tenants["nobody"].http.get(
                    "/v1/sessions", headers={b"authorization": (b"Bearer " + raw).strip()}
                )
            case 1:
                reply = http.get(f"/v1/sessions/{urllib.parse.quote(text, safe='')}")
            case 2:
                reply = http.get("/v1/sessions", params={"after": text})
            case 3:
                reply = http.post("/v1/rewards", json={"turn_id": text, "value": 1.0})
            case 4:
                named = urllib.parse.quote(f"{text} ", safe="")
                reply = http.post(f"/sessions/{named}/v1/chat/completions", json=CHAT)
            case _:
                reply = http.post("/v1/sessions", json={"session_id": f"{text}\n"})
        statuses.append((reply.status_code, number % 6, text))
        for path in ("/v1/sessions", "/v1/experiences"):
            if number % 20 == 0:
                found = http.get(path, params={"task_id": text})
                assert found.status_code == 422 or found.content == b"" or found.json()["data"] == []
    assert [each for each in statuses if not 400 <= each[0] < 500] == []
    assert http.get("/v1/sessions/bystander").json()["num_turns"] == 1
