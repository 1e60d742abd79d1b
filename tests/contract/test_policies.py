"""Named policies of a running proxy: each key's calls sample with its policy, and other tenants cannot reach it."""

import collections
import contextlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import sqlalchemy as sa
from support.commands import run_turnwise
from support.ledger_samples import update_record
from support.migrated import migrated
from support.proxies import RunningProxy, running_proxy
from support.tiny_checkpoints import FACTORS, write_adapter
from support.waiting import wait_until
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine
from turnwise_fake_engine.script import Fault, FaultKind

from turnwise.features import policies
from turnwise.features.policies import publish_next
from turnwise.store import keys, rows, schema, trainer_reports
from turnwise.store.database import Database
from turnwise.types import PolicyKind

FLAGS = ("--holdout-share", "0", "--policy-tenant", "a")
ARMS = ("--canary-share", "0.5", "--canary-min-sessions", "2", "--canary-max-sessions", "2", "--holdout-share", "0.5")


class World:
    """A proxy over an engine with adapters, and a client of each key: two policies of `a`, one of `b`."""

    def __init__(self, proxy: RunningProxy, engine: RunningFakeEngine, database: Database, directory: Path) -> None:
        self.proxy, self.engine, self.database, self.directory = proxy, engine, database, directory
        self.http: dict[str, httpx2.Client] = {}
        self.served: dict[str, int] = {}
        """The version that each key's sessions sample with."""
        self.num_calls = 0
        for tenant in ("a", "b"):
            self.add_key(f"admin-{tenant}", tenant, "default")

    def add_key(self, name: str, tenant: str, policy: str, role: keys.KeyRole = keys.KeyRole.ADMIN) -> None:
        with self.database.write() as conn:
            _, key = keys.create_key(conn, tenant, role, name, policy=policy)
        headers = {"authorization": f"Bearer {key}"}
        self.http[name] = httpx2.Client(base_url=self.proxy.url, headers=headers)
        self.served[name] = 0

    def add_policy(self, tenant: str, name: str, **fields: Any) -> dict:
        created = self.post(f"admin-{tenant}", "/v1/policies", {"name": name, **fields})
        self.add_key(f"{name}-{tenant}", tenant, name, keys.KeyRole.AGENT)
        return created

    def post(self, key: str, path: str, body: dict) -> dict:
        return self.http[key].post(path, json=body).raise_for_status().json()

    def get(self, key: str, path: str) -> dict:
        return self.http[key].get(path).raise_for_status().json()

    def publish(self, tenant: str, policy: str, status: str = "active") -> int:
        path = write_adapter(self.directory / f"adapter-{len(list(self.directory.iterdir()))}")
        with self.database.write() as conn:
            number = policies.find_policy(conn, tenant, policy).policy_id
            version = publish_next(conn, str(path), PolicyKind.LORA, metrics={}, policy_id=number).version
        wait_until(lambda: self.status(tenant, version) == status, f"it is {status}")
        return version

    def status(self, tenant: str, version: int) -> str:
        return next(
            each["status"] for each in self.get(f"admin-{tenant}", "/v1/policies")["data"] if each["version"] == version
        )

    def metrics(self) -> list[str]:
        return self.http["admin-a"].get("/metrics").text.splitlines()

    def num_loads(self) -> float:
        return sum(
            float(line.split()[-1]) for line in self.metrics() if line.startswith("turnwise_adapter_loads_total")
        )

    def call(self, key: str, model: str = "gpt-5", session: str | None = None) -> httpx2.Response:
        self.num_calls += 1
        body = {"model": model, "messages": [{"role": "user", "content": f"Question {self.num_calls}."}]}
        return self.http[key].post(
            "/v1/chat/completions", json=body, headers={} if session is None else {"x-session-id": session}
        )

    def sampled(self, *arguments: Any) -> int:
        """Make a call; return the version that sampled it, as the client, the ledger and the engine say."""
        reply = self.call(*arguments)
        assert reply.status_code == 200, reply.text
        version = int(reply.headers["x-policy-version"])
        (turn,) = (view.turn for view in self.proxy.turns() if view.turn.turn_id == reply.json()["id"])
        assert (turn.policy_version_first, turn.policy_version_last) == (version, version)
        asked = self.engine.calls[-1].body["model"]
        assert asked.startswith(f"policy-v{version}-") if version else asked == "fake"
        return version


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    url = migrated(f"sqlite:///{tmp_path}/turnwise.db")
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    with (
        running_fake_engine(Script(lora=True)) as engine,
        contextlib.closing(Database(url)) as database,
        contextlib.ExitStack() as stack,
    ):
        with database.write() as conn:  # a proxy without keys accepts any, for some seconds
            keys.create_key(conn, "a", keys.KeyRole.ADMIN, "the first key")
        flags = getattr(request, "param", FLAGS)
        proxy = stack.enter_context(running_proxy(engine.url, url, tmp_path, *flags))
        world = World(proxy, engine, database, adapters)
        yield world
        for client in world.http.values():
            client.close()


def test_each_key_samples_with_its_policy_at_any_order_of_calls(world):
    """A policy samples with the engine's model before its first version; a clone with what it was cloned from."""
    created = world.add_policy("a", "support")
    assert (created["tenant"], created["name"], created["base_version"]) == ("a", "support", None)
    world.add_policy("a", "sales")
    world.add_policy("b", "support")
    served = {"admin-a": 0, "support-a": 0, "sales-a": 0, "support-b": 0, "admin-b": 0}
    assert {key: world.sampled(key) for key in served} == served
    served["support-a"] = world.publish("a", "support")
    served["support-b"] = world.publish("b", "support")
    assert world.add_policy("a", "clone", base="support")["base_version"] == served["support-a"]
    served["clone-a"] = served["support-a"]
    order = random.Random(29).choices(sorted(served), k=24)
    assert [(key, world.sampled(key)) for key in order] == [(key, served[key]) for key in order]
    gauges = {f'{{policy="support",tenant="{tenant}"}} {served[f"support-{tenant}"]}.0' for tenant in ("a", "b")}
    assert gauges <= {line.removeprefix("turnwise_named_policy_version") for line in world.metrics()}
    lines = world.http["support-b"].get("/metrics").text.splitlines()
    named = [line for line in lines if line.startswith("turnwise_named_policy_version{")]
    assert named == [f'turnwise_named_policy_version{{policy="support",tenant="b"}} {served["support-b"]}.0']
    first, served["support-a"] = served["support-a"], world.publish("a", "support")
    assert {key: world.sampled(key) for key in served} == served
    world.post("admin-a", f"/v1/policies/{first}/activate", {})
    wait_until(lambda: world.status("a", first) == "active", "it is served again")
    assert {key: world.sampled(key) for key in served} == served | {"support-a": first}


def test_a_model_name_asks_for_a_policy_or_one_of_its_versions(world):
    """Any other name is the key's own policy, or its session's. What `NAME@VERSION` samples is not trained."""
    world.add_policy("a", "support")
    old, new = world.publish("a", "support"), world.publish("a", "support")
    asked = {"support": new, f"support@{old}": old, "default@0": 0, "default": 0, "claude@20240620": new, "gpt": new}
    assert {model: world.sampled("support-a", model) for model in asked} == asked
    assert world.sampled("admin-a", "support", "named") == new
    assert world.sampled("admin-a", "gpt-5", "named") == new
    assert world.sampled("admin-a", "default", "named") == 0
    assert world.sampled("admin-a", "gpt-5", "named") == new
    assert world.sampled("admin-a", f"support@{old}", "evaluated") == old
    splits = {name: world.get("admin-a", f"/v1/sessions/{name}")["split"] for name in ("named", "evaluated")}
    assert splits == {"named": "train", "evaluated": "eval"}
    missing = world.call("support-a", "support@0")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_session_is_created_with_a_policy_and_shows_and_is_found_by_its_name(world):
    """It cannot get another one; a policy that the tenant does not have is not found."""
    world.add_policy("a", "support")
    world.add_policy("b", "theirs")
    version = world.publish("a", "support")
    created = world.post("admin-a", "/v1/sessions", {"session_id": "s", "policy": "support"})
    assert (created["policy"], world.sampled("admin-a", "gpt-5", "s")) == ("support", version)
    assert world.post("admin-a", "/v1/sessions", {"session_id": "s"})["policy"] == "support"
    assert world.post("support-a", "/v1/sessions", {"session_id": "of-key"})["policy"] == "support"
    assert world.post("support-a", "/v1/sessions", {"session_id": "d", "policy": "default"})["policy"] == "default"
    found = {
        name: sorted(each["session_id"] for each in world.get("admin-a", f"/v1/sessions?policy={name}")["data"])
        for name in ("support", "default", "theirs")
    }
    assert found == {"support": ["of-key", "s"], "default": ["d"], "theirs": []}
    shown = world.get("admin-a", "/v1/sessions/s")
    assert (shown["policy"], world.post("admin-a", "/v1/sessions/s/end", {})["policy"]) == ("support", "support")
    fork = world.post(
        "admin-a", f"/v1/turns/{world.get('admin-a', '/v1/sessions/s/turns')['data'][0]['turn_id']}/fork", {}
    )
    assert fork["policy"] == "support"
    refused = {
        name: world.http["admin-a"].post("/v1/sessions", json={"session_id": "s", "policy": name})
        for name in ("default", "theirs")
    }
    assert {name: (reply.status_code, reply.json()["error"]["param"]) for name, reply in refused.items()} == {
        "default": (409, "policy"),
        "theirs": (404, "policy"),
    }


class Agent:
    """One agent of a harness: a conversation that it sends with each call, naming its policy as the model."""

    def __init__(self, world: World, policy: str, session: str | None = "both", said: list[dict] | None = None) -> None:
        self.world, self.policy, self.session = world, policy, session
        self.messages = said or [{"role": "system", "content": "You are an agent of a team."}]

    def ask(self, text: str, key: str = "admin-a", **fields: Any) -> dict:
        """Send the conversation with another question; return the stored turn as the API shows it."""
        self.messages.append({"role": "user", "content": text})
        headers = {} if self.session is None else {"x-session-id": self.session}
        headers |= {name: fields.pop(name) for name in ("idempotency-key",) if name in fields}
        body = {"model": self.policy, "messages": self.messages, **fields}
        reply = self.world.http[key].post("/v1/chat/completions", json=body, headers=headers).raise_for_status()
        self.messages = [*self.messages, reply.json()["choices"][0]["message"]]
        return self.world.get("admin-a", f"/v1/turns/{reply.json()['id']}")


@contextlib.contextmanager
def another_process(world: World, directory: Path) -> Iterator[None]:
    """Run a second proxy over the same store, which the key `second` of the world calls."""
    headers = world.http["admin-a"].headers
    with (
        running_proxy(world.engine.url, world.proxy.database_url, directory, *FLAGS) as second,
        httpx2.Client(base_url=second.url, headers=headers) as world.http["second"],
    ):
        yield


def places(turns: list[dict]) -> list[tuple[Any, ...]]:
    """Return of each turn: its policy, its version, the turn that it extends, its role, and why it starts a chain."""
    seq = {turn["turn_id"]: turn["seq"] for turn in turns}
    return [
        (each["policy"], each["policy_version_first"], seq.get(each["parent_turn_id"]), each["role"], each["reason"])
        for each in turns
    ]


@pytest.fixture
def team(world: World) -> tuple[World, int, int]:
    """Return a world with the policies `planner` and `solver`, and their versions."""
    for name in ("planner", "solver"):
        world.add_policy("a", name)
    return world, world.publish("a", "planner"), world.publish("a", "solver")


def test_two_policies_sample_in_one_session_each_on_chains_of_its_own(team, tmp_path):
    """Their agents say the same and are never siblings or retries; another process continues both chains."""
    world, planned, solved = team
    planner, solver = Agent(world, "planner"), Agent(world, "solver")
    for number in range(2):
        planner.ask(f"Question {number}?")
        solver.ask(f"Question {number}?")
    with another_process(world, tmp_path):
        for agent in (planner, solver):
            agent.ask("And now?", "second")
    planner.ask("Only the planner hears this.")
    handed = Agent(world, "solver", said=list(planner.messages))
    handed.ask("Take over.")
    handed.ask("Go on.")
    listed = world.get("admin-a", "/v1/sessions/both/turns")["data"]
    assert places(listed) == [
        ("planner", planned, None, "main", None),
        ("solver", solved, None, "main", None),
        ("planner", planned, 0, "main", None),
        ("solver", solved, 1, "main", None),
        ("planner", planned, 2, "main", None),
        ("solver", solved, 3, "main", None),
        ("planner", planned, 4, "main", None),
        ("solver", solved, 5, "main", "policy_changed"),
        ("solver", solved, 7, "main", None),
    ]
    assert {each["outcome"] for each in listed} == {"exact"}
    session = world.get("admin-a", "/v1/sessions/both")
    assert (session["policy"], session["num_chains"]) == ("planner", 2)
    for name in ("planner", "solver"):
        found = world.get("admin-a", f"/v1/sessions?policy={name}")["data"]
        assert [each["session_id"] for each in found] == ["both"]
    held = {each["name"]: each["summary"]["num_sessions"] for each in list_policies(world)}
    assert held == {"default": 0, "planner": 1, "solver": 1}
    world.post("admin-a", "/v1/sessions/both/end", {"reward": 1.0})
    for name, count in (("planner", 4), ("solver", 5)):
        text = world.http["admin-a"].get(f"/v1/experiences?policy={name}").text
        lines = [json.loads(line) for line in text.splitlines()]
        assert {(each["policy"], each["session_reward"]) for each in lines} == {(name, 1.0)}
        assert len(lines) == count
    fork = world.post("admin-a", f"/v1/turns/{listed[1]['turn_id']}/fork", {"session_id": "forked"})
    (copy,) = world.get("admin-a", "/v1/sessions/forked/turns")["data"]
    assert (fork["policy"], copy["policy"]) == ("solver", "solver")
    assert world.get("admin-a", f"/v1/turns/{listed[1]['turn_id']}/logprobs")["policy_version"] == solved


def list_policies(world: World) -> list[dict]:
    return world.get("admin-a", "/v1/policies?summary=true")["policies"]


def test_a_retry_and_choices_are_of_the_policy_that_their_call_names(team):
    """The same words under one key for another policy are another request."""
    world, planned, solved = team
    first = Agent(world, "planner").ask("Which way?", **{"idempotency-key": "k"})
    solver = Agent(world, "solver")
    kept = solver.ask("Which way?", n=2, **{"idempotency-key": "l"})
    num_calls = len(world.engine.calls)
    again = Agent(world, "solver").ask("Which way?", n=2, **{"idempotency-key": "l"})
    assert (again["turn_id"], len(world.engine.calls)) == (kept["turn_id"], num_calls)
    body = {"model": "solver", "messages": solver.messages[:-1]}
    headers = {"x-session-id": "both", "idempotency-key": "k"}
    reused = world.http["admin-a"].post("/v1/chat/completions", json=body, headers=headers)
    assert (reused.status_code, reused.json()["error"]["code"]) == (409, "idempotency_key_reused")
    listed = world.get("admin-a", "/v1/sessions/both/turns")["data"]
    assert [each["turn_id"] for each in listed] == [first["turn_id"], kept["turn_id"], f"{kept['turn_id']}#1"]
    assert [place[:3] for place in places(listed)] == [("planner", planned, None), *[("solver", solved, None)] * 2]


def test_an_unnamed_session_is_found_by_the_conversation_of_either_policy(team, tmp_path):
    """A conversation that another policy goes on with is handed over; its own sessions come first. Restarts too."""
    world, planned, solved = team
    planner = Agent(world, "planner", None)
    session_id = planner.ask("Plan it.")["session_id"]
    solver = Agent(world, "solver", None, list(planner.messages))
    assert solver.ask("Solve it.")["session_id"] == session_id
    with another_process(world, tmp_path):
        assert [agent.ask("Go on.", "second")["session_id"] for agent in (planner, solver)] == [session_id] * 2
    assert places(world.get("admin-a", f"/v1/sessions/{session_id}/turns")["data"]) == [
        ("planner", planned, None, "main", None),
        ("solver", solved, None, "main", "policy_changed"),
        ("planner", planned, 0, "main", None),
        ("solver", solved, 1, "main", None),
    ]


PINS = {"policy:planner": {"temperature": 0.25}, "policy:solver": {"temperature": 0.75}}


@pytest.mark.parametrize("world", [(*FLAGS, "--sampling-pins", json.dumps(PINS))], indirect=True)
def test_pins_are_those_of_the_policy_that_a_call_names(team):
    asked = [Agent(team[0], name).ask("Which way?")["sampling"]["temperature"] for name in ("planner", "solver")]
    assert asked == [0.25, 0.75]


@pytest.mark.parametrize("world", [ARMS], indirect=True)
def test_a_session_in_an_arm_samples_other_policies_as_served(team):
    """The arm is one of the session's own policy. What is compared of its versions leaves out the other's turns."""
    world, planned, solved = team
    tried = world.publish("a", "planner", "canary")
    versions: dict[str, set[int]] = collections.defaultdict(set)
    for number in range(12):
        versions["planner"].add(world.sampled("admin-a", "planner", f"s{number}"))
        versions["solver"].add(world.sampled("admin-a", "solver", f"s{number}"))
        world.post("admin-a", f"/v1/sessions/s{number}/end", {"reward": 1.0})
    assert versions == {"planner": {planned, tried}, "solver": {solved}}
    wait_until(lambda: world.status("a", tried) == "active", "it is promoted")


def test_policies_are_listed_with_what_they_hold(world):
    world.add_policy("a", "support")
    world.add_policy("a", "empty")
    version = world.publish("a", "support")
    world.sampled("support-a")
    listed = world.get("admin-a", "/v1/policies?summary=true")["policies"]
    held = {each["name"]: (each["summary"]["served_version"], each["summary"]["num_sessions"]) for each in listed}
    assert held == {"default": (None, 0), "support": (version, 1), "empty": (None, 0)}
    sizes = {each["name"]: each["summary"]["num_bytes"] for each in listed}
    files = (world.directory / "adapter-0").rglob("*")
    assert sizes == {"default": 0, "support": sum(each.stat().st_size for each in files if each.is_file()), "empty": 0}
    assert [each["name"] for each in world.get("admin-b", "/v1/policies?summary=true")["policies"]] == ["default"]
    assert "summary" not in world.get("admin-a", "/v1/policies")["policies"][0]


def test_a_directory_of_two_policies_is_measured_without_its_trainers_state_and_stays(world):
    """The state beside it is of the policy that was trained; nobody is told to remove what another policy uses."""
    path = {name: str(write_adapter(world.directory / name)) for name in ("shared", "own")}
    with world.database.write() as conn:
        for tenant, name in (("a", "shared"), ("b", "shared"), ("b", "own")):
            policies.create_policy(conn, tenant, f"of-{name}", adapter=path[name])
    state = world.directory / "shared.trainer"
    state.mkdir()
    (state / "optimizer.pt").write_bytes(b"0" * 1000)
    num_bytes = sum(each.stat().st_size for each in (world.directory / "shared").rglob("*") if each.is_file())
    listed = world.get("admin-b", "/v1/policies?summary=true")["policies"]
    assert {each["name"]: each["summary"]["num_bytes"] for each in listed}["of-shared"] == num_bytes
    deleted = world.http["admin-b"].delete("/v1/tenant").raise_for_status().json()
    assert (deleted["num_policies"], deleted["directories_left"]) == (2, [path["own"]])


def test_another_tenants_policy_does_not_exist(world):
    world.add_policy("a", "support")
    version = world.publish("a", "support")
    listed = world.get("admin-b", "/v1/policies")
    assert ([each["name"] for each in listed["policies"]], listed["data"]) == (["default"], [])
    assert world.sampled("admin-b", "support") == 0
    assert world.sampled("admin-b", f"support@{version}") == 0
    path = str(world.directory / "adapter-0")
    refused = {
        "read": world.http["admin-b"].get("/v1/policies?policy=support"),
        "pin": world.http["admin-b"].post(f"/v1/policies/{version}/activate", json={}),
        "publish": world.http["admin-b"].post("/v1/policies", json={"path": path, "kind": "lora", "policy": "support"}),
        "clone": world.http["admin-b"].post("/v1/policies", json={"name": "mine", "base": f"support@{version}"}),
        "clone its policy": world.http["admin-b"].post("/v1/policies", json={"name": "mine", "base": "support"}),
        "bind": world.http["admin-b"].post("/v1/keys", json={"policy": "support"}),
    }
    assert {what: reply.status_code for what, reply in refused.items()} == dict.fromkeys(refused, 404)
    of_none = world.http["admin-b"].post(f"/v1/policies/{version + 1}/activate", json={})
    told = [
        reply.json()["error"]["message"].replace(str(number), "N")
        for reply, number in ((refused["pin"], version), (of_none, version + 1))
    ]
    assert (of_none.status_code, len(set(told))) == (404, 1), told
    world.add_policy("b", "own")
    for stolen in ({"name": "thief", "path": path}, {"path": path, "kind": "lora", "policy": "own"}):
        reply = world.http["admin-b"].post("/v1/policies", json=stolen)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "path_not_allowed")
    world.post("admin-a", "/v1/policies", {"path": path, "kind": "lora"})
    paths = {key: [each["path"] for each in world.get(key, "/v1/policies")["data"]] for key in ("admin-a", "admin-b")}
    assert paths == {"admin-a": [path, path], "admin-b": [None]}
    bound = world.post("admin-a", "/v1/keys", {"policy": "support"})
    assert bound["policy"] == "support"
    assert world.sampled("support-a") == version


def test_a_tenants_metrics_have_its_own_groups_trainers_and_last_update(world):
    """To `a`, which owns the model, they show all; to `b` no number of `a`'s policy, whose update is the newest."""
    world.add_policy("a", "support")
    with world.database.write() as conn:
        number = policies.find_policy(conn, "a", "support").policy_id
        for name in ("trainer", f"trainer/{number}"):
            trainer_reports.report_status(conn, name, "")
        for update, policy_id in ((1, 0), (2, number)):
            metrics = {"reward_mean": 0.25 * update, "trained_share": 0.5 * update}
            record = update_record(update, policy_id=policy_id, metrics=metrics)
            conn.execute(sa.insert(schema.updates).values(**rows.UPDATES.row(record)))
    for key, group in (("admin-a", "x"), ("admin-a", "y"), ("admin-b", "x")):
        world.post(key, "/v1/sessions", {"group_id": group, "group_size": 2})
    names = ['groups{status="open"}', 'trainers{state="running"}', "last_update"]
    names += ["last_update_reward_mean", "last_update_trained_share"]
    seen = {}
    for key in ("admin-a", "admin-b"):
        lines = dict(line.rsplit(" ", 1) for line in world.http[key].get("/metrics").text.splitlines())
        seen[key] = [float(lines[f"turnwise_{name}"]) for name in names]
        assert lines.keys() >= {"turnwise_last_update_timestamp_seconds", 'turnwise_groups{status="claimed"}'}
    assert seen == {"admin-a": [3, 2, 2, 0.5, 1.0], "admin-b": [1, 1, 1, 0.25, 0.5]}


def test_a_tenant_sees_no_trainer_and_no_update_of_another_tenants_policy(world):
    """The trainer of a policy has its number in its id. Its state alone is public, as that of each trainer.

    To the tenant that owns the model, `a`, the doctor names every trainer.
    """
    world.add_policy("a", "support")
    world.add_policy("b", "own")
    with world.database.write() as conn:
        number, other = (policies.find_policy(conn, *each).policy_id for each in (("a", "support"), ("b", "own")))
        said = {"trainer": "2 of 8", f"trainer/{number}": "policy 'support': 3 of 8", f"trainer/{other}": "own"}
        for name, text in said.items():
            trainer_reports.report_status(conn, name, text)
        for update, policy_id in ((1, number), (2, 0)):
            record = update_record(update, policy_id=policy_id)
            conn.execute(sa.insert(schema.updates).values(**rows.UPDATES.row(record)))
    seen = {"admin-a": ({"trainer", f"trainer/{number}"}, 2), "admin-b": ({"trainer", f"trainer/{other}"}, 1)}
    for key, (trainers, num_updates) in seen.items():
        counts = world.get(key, "/v1/counts")
        assert ({each["trainer_id"] for each in counts["trainers"]}, counts["num_updates"]) == (trainers, num_updates)
        checks = {each["check"] for each in world.get(key, "/v1/doctor")["data"]}
        examined = set(said) if key == "admin-a" else trainers
        assert {each for each in checks if each.startswith("trainer")} == {f"trainer {each}" for each in examined}
        texts = {each["trainer_id"]: each["text"] for each in world.get(key, "/readyz")["trainers"]}
        assert {each for each, text in texts.items() if text is not None} == trainers


def test_a_version_that_fails_changes_no_other_policy(world):
    """A's broken version fails and A stays at its last good one; B goes on, and gets its next one."""
    world.add_policy("a", "support")
    world.add_policy("b", "support")
    served = {"support-a": world.publish("a", "support"), "support-b": world.publish("b", "support")}
    with world.database.write() as conn:
        broken = publish_next(
            conn,
            str(world.directory / "missing"),
            PolicyKind.LORA,
            metrics={},
            policy_id=policies.find_policy(conn, "a", "support").policy_id,
        ).version
    wait_until(lambda: world.status("a", broken) == "failed", "it has failed")
    assert {key: world.sampled(key) for key in served} == served
    served["support-b"] = world.publish("b", "support")
    assert {key: world.sampled(key) for key in served} == served
    failed = world.call("support-a", f"support@{broken}")
    assert (failed.status_code, failed.json()["error"]["code"]) == (409, "version_not_loaded")


def test_a_policy_starts_from_an_adapter_that_was_checked(world):
    """It samples with it, and its key knows its policy. What is no adapter creates no policy."""
    path = str(write_adapter(world.directory / "brought"))
    created = world.post("admin-a", "/v1/policies", {"name": "brought", "path": path})
    assert world.post("admin-a", "/v1/policies", {"name": "brought", "path": path}) == created
    key = world.http["admin-a"].headers["authorization"].removeprefix("Bearer ")
    at = ("--url", world.proxy.url, "--api-key", key)
    assert "exists already" in run_turnwise("policies", "create", "brought", "--adapter", path, *at).stdout
    assert "another base" in run_turnwise("policies", "create", "brought", *at).stderr
    world.add_key("brought-a", "a", "brought", keys.KeyRole.AGENT)
    assert world.sampled("brought-a") == created["base_version"]
    own = {key: world.get(key, "/v1/policies?limit=1")["key_policy"] for key in ("brought-a", "admin-a")}
    assert own == {"brought-a": "brought", "admin-a": "default"}
    scaled = str(write_adapter(world.directory / "scaled", use_rslora=True))
    for wrong in ({"path": str(world.directory)}, {"path": path, "base": "brought"}, {"path": scaled}):
        refused = world.http["admin-a"].post("/v1/policies", json={"name": "wrong"} | wrong)
        assert refused.status_code == 422
    assert "wrong" not in {each["name"] for each in world.get("admin-a", "/v1/policies")["policies"]}


def test_a_brought_adapter_that_the_engine_does_not_apply_is_not_served(world):
    """It has no probe of a trainer's, so it is compared with the model under it; one that changes nothing is served."""
    for name, value, shift, status in (
        ("skipped", 0.5, 0.0, "failed"),
        ("applied", 0.5, -0.5, "active"),
        ("new", 0.0, 0.0, "active"),
    ):
        factors = {each: np.full_like(tensor, value) for each, tensor in FACTORS.items()}
        path = str(write_adapter(world.directory / name, factors))
        world.engine.state.script.logprob_shifts[name] = shift
        version = world.post("admin-a", "/v1/policies", {"name": name, "path": path})["base_version"]
        wait_until(lambda: world.status("a", version) == status, f"{name} is {status}")  # noqa: B023
    (failed,) = (each for each in world.get("admin-a", "/v1/policies?policy=skipped")["data"])
    assert "the same logprobs with the adapter" in json.dumps(failed)
    assert not any(name.startswith(f"policy-v{failed['version']}-") for name in world.engine.state.adapters)


def test_an_archived_policy_gets_no_calls_until_it_is_in_use_again(world):
    """Its adapter leaves the engine, and comes back; another tenant cannot archive it."""
    world.add_policy("a", "support")
    version = world.publish("a", "support")
    assert world.sampled("support-a", "gpt-5", "s") == version
    assert world.http["admin-b"].post("/v1/policies/support/archive", json={}).status_code == 404
    assert world.http["admin-a"].post("/v1/policies/default/archive", json={}).status_code == 400
    assert world.post("admin-a", "/v1/policies/support/archive", {})["archived_at"] is not None
    refused = [
        world.call("support-a"),
        world.call("support-a", "gpt-5", "s"),
        world.call("admin-a", f"support@{version}"),
        world.http["admin-a"].post("/v1/sessions", json={"policy": "support"}),
    ]
    codes = [(reply.status_code, reply.json()["error"]["code"]) for reply in refused]
    assert codes == [(409, "policy_archived")] * 4
    assert world.sampled("admin-a") == 0
    wait_until(lambda: not world.engine.state.adapters, "its adapter has left the engine")
    assert world.post("admin-a", "/v1/policies/support/archive", {"archived": False})["archived_at"] is None
    assert world.sampled("support-a", "gpt-5", "s") == version


@pytest.mark.parametrize("world", [ARMS], indirect=True)
def test_each_policy_has_its_own_trial_and_hold_out_and_a_session_keeps_its_arm(world):
    """Versions 1 and 3 are of one policy, 2 of another: its sessions are in no arm, whatever becomes of the first."""
    world.add_policy("a", "support")
    world.add_policy("b", "support")
    old, others = world.publish("a", "support"), world.publish("b", "support")
    new = world.publish("a", "support", "canary")

    def play(prefix: str) -> dict[int, int]:
        """Play sessions of both policies; return how many of the first one's sampled with each version."""
        found: dict[int, int] = collections.defaultdict(int)
        for number in range(10):
            versions = {world.sampled("support-a", "gpt", f"{prefix}{number}") for _ in range(2)}
            assert len(versions) == 1
            found[versions.pop()] += 1
            assert world.sampled("support-b", "gpt", f"{prefix}{number}") == others
            assert world.get("admin-b", f"/v1/sessions/{prefix}{number}")["arm"] is None
        return found

    on_trial = play("trial")
    assert (min(on_trial[old], on_trial[new]) >= 2, sum(on_trial.values())) == (True, 10)
    for number in range(10):
        world.post("admin-a", f"/v1/sessions/trial{number}/end", {"reward": 1.0})
    wait_until(lambda: world.status("a", new) == "active", "it is promoted")
    assert world.status("a", old) == "holdout"
    held = play("held")
    assert (min(held[old], held[new]) >= 2, sum(held.values())) == (True, 10)
    assert world.sampled("support-a", "gpt", "trial0") == new
    listed = {each["version"]: each for each in world.get("admin-a", "/v1/policies?policy=support")["data"]}
    assert {name: arm["version"] for name, arm in listed[new]["arms"].items() if "version" in arm} == {
        "canary": new,
        "control": old,
    }
    assert world.status("b", others) == "active"


def test_a_reply_of_another_adapter_than_the_call_was_sent_to_is_not_trained(world):
    """The engine's own record of the adapter counts, whole and streamed; the metric has the reason."""
    world.add_policy("a", "support")
    version = world.publish("a", "support")
    body = {"model": "gpt", "messages": [{"role": "user", "content": "Which adapter?"}]}
    for stream, count in itertools.product((False, True), (0, 1)):
        world.engine.state.script.faults = [Fault(kind=FaultKind.ANOTHER_MODEL, count=count)]
        world.http["support-a"].post("/v1/chat/completions", json=body | {"stream": stream}).raise_for_status()
    turns = [view.turn for view in world.proxy.turns()]
    assert sorted((turn.policy_version_first, turn.outcome, turn.reason) for turn in turns) == [
        *[(version, "exact", None)] * 2,
        *[(version, "untrainable", "another_model")] * 2,
    ]
    counted = 'turnwise_turns_total{outcome="untrainable",reason="another_model"} 2.0'
    assert counted in world.metrics()


def test_an_engine_that_lost_an_adapter_loads_it_at_the_next_call(world):
    """The call waits for one load, which is counted; whether the proxy has noticed the loss or not."""
    world.add_policy("a", "support")
    version = world.publish("a", "support")
    before = world.num_loads()
    world.engine.state.adapters.clear()
    assert world.sampled("support-a") == version
    assert world.sampled("support-a") == version
    assert world.num_loads() == before + 1
