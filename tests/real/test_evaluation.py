"""The trainer's evaluation: a command plays held-out sessions through a real proxy; the ledger has the results."""

import json
import sys

import pytest
from support.control_plane import ask, publish
from support.ledger_samples import groups_by_status
from support.proxies import RunningProxy
from support.tiny_checkpoints import write_weights

from trainer.claims.ledger import Ledger
from trainer.features import Settings
from trainer.features.evaluation import Evaluator
from turnwise.store import keys, versions
from turnwise.store.database import Database
from turnwise.types import PolicyStatus, PolicyVersion

AGENT = """
import json, sys, urllib.request, uuid
from openai import OpenAI

url, rewards = sys.argv[1], json.loads(sys.argv[2])

def post(path, body):
    data = json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"})).close()

for number, (split, reward, num_turns) in enumerate(rewards):
    name = f"{split}-{uuid.uuid4().hex}"
    post("/v1/sessions", {"session_id": name, "split": split})
    client, messages = OpenAI(base_url=f"{url}/sessions/{name}/v1", api_key="none"), []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"question {number} {turn}"})
        reply = client.chat.completions.create(model="fake", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    if reward is not None:
        post("/v1/rewards", {"session_id": name, "value": reward})
        post(f"/v1/sessions/{name}/end", {})
"""


@pytest.fixture
def database(proxy: RunningProxy):
    database = Database(proxy.database_url)
    yield database
    database.close()


def evaluator(database: Database, proxy: RunningProxy, *sessions: tuple[str, float | None, int]) -> Evaluator:
    return running(database, AGENT, proxy.url, json.dumps(sessions))


def running(database: Database, program: str, *arguments: str, **changes: object) -> Evaluator:
    settings = Settings(evaluation_command=(sys.executable, "-c", program, *arguments), **changes)
    return Evaluator(Ledger(database, settings), settings)


def test_held_out_sessions_are_played_by_the_version_that_was_just_published(proxy, database, tmp_path):
    """It waits until engines serve it; sessions of the training split, and those still open, do not count."""
    version = publish(proxy, write_weights(tmp_path / "v1"))
    played = [("eval", 1.0, 1), ("eval", 0.0, 3), ("train", 0.5, 1), ("eval", 1.0, 2), ("eval", None, 1)]
    found = evaluator(database, proxy, *played).evaluate(version)
    assert found == {
        "policy_version": version,
        "oldest_policy_version": version,
        "reward_mean": pytest.approx(2 / 3),
        "turns_mean": 2.0,
        "num_sessions": 3,
        "reward_margin": pytest.approx(0.6533, abs=1e-4),  # 1.96 x sqrt(1/3) / sqrt(3)
    }
    [listed] = [policy for policy in ask(proxy.url, "/v1/policies")["data"] if policy["version"] == version]
    assert listed["metrics"]["eval"] == found
    assert groups_by_status(database) == {"ready": 1}  # only the training session


def test_an_evaluation_counts_no_session_twice(proxy, database, tmp_path):
    """Sessions of earlier evaluations, also of other processes, are not counted either."""
    version = publish(proxy, write_weights(tmp_path / "v1"))
    evaluator(database, proxy, ("eval", 0.0, 1)).evaluate(version)
    next_process = evaluator(database, proxy, ("eval", 1.0, 1), ("eval", 0.5, 1))
    for _ in range(2):
        found = next_process.evaluate(version)
        assert (found["num_sessions"], found["reward_mean"]) == (2, 0.75)
    read_only = Evaluator(Ledger(database, Settings()), Settings())
    assert read_only.evaluate(version)["num_sessions"] == 5
    assert read_only.evaluate(version) == {}


def test_an_evaluation_does_not_wait_for_a_version_that_engines_refuse(proxy, database, tmp_path, caplog):
    """The served version is played instead, the gauges name it, and the refused version gets no results."""
    with database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=7, path=str(tmp_path / "nothing")))
    found = evaluator(database, proxy, ("eval", 1.0, 1)).evaluate(7)
    assert (found["policy_version"], found["num_sessions"]) == (0, 1)
    assert "not served yet" not in caplog.text
    with database.read() as connection:
        assert versions.get_version(connection, 7).status is PolicyStatus.FAILED
        assert "eval" not in versions.get_version(connection, 7).metrics


def test_a_command_that_fails_is_reported_and_gives_no_evaluation(proxy, database, tmp_path, caplog):
    version = publish(proxy, write_weights(tmp_path / "v1"))
    assert running(database, "raise SystemExit(3)").evaluate(version) == {}
    assert "exited with status 3" in caplog.text


PRINTS_ENVIRONMENT = """
import json, os, sys, urllib.request
shown = {name: os.environ[name] for name in os.environ if name.startswith(("TURNWISE_", "OPENAI_"))}
request = urllib.request.Request(shown["TURNWISE_BASE_URL"] + "/models")
request.add_header("authorization", f"Bearer {shown['TURNWISE_API_KEY']}")
shown["model"] = json.load(urllib.request.urlopen(request))["data"][0]["id"]
json.dump(shown, open(sys.argv[1], "w"))
"""


@pytest.mark.parametrize("with_keys", [False, True])
def test_the_command_gets_the_proxys_address_a_temporary_key_and_the_version(proxy, database, tmp_path, with_keys):
    """The key works while the command runs and is revoked afterwards; without any key the proxy stays open."""
    version = publish(proxy, write_weights(tmp_path / "v1"))
    if with_keys:
        with database.write() as conn:
            keys.create_key(conn, "default", keys.KeyRole.ADMIN, "operator")
    output = tmp_path / "environment.json"
    running(database, PRINTS_ENVIRONMENT, str(output), proxy_url=proxy.url).evaluate(version)
    environment = json.loads(output.read_text())
    assert environment["model"] == "fake"
    assert (environment["TURNWISE_POLICY_VERSION"], environment["TURNWISE_RUN_URL"]) == (str(version), proxy.url)
    assert environment["OPENAI_BASE_URL"] == environment["TURNWISE_BASE_URL"] == f"{proxy.url}/v1"
    assert environment["OPENAI_API_KEY"] == environment["TURNWISE_RUN_API_KEY"] == environment["TURNWISE_API_KEY"]
    assert (environment["TURNWISE_API_KEY"] == "none") == (not with_keys)
    with database.read() as conn:
        made = [key for key in keys.list_keys(conn) if key.name == "evaluation"]
    assert [key.revoked_at is not None for key in made] == ([True] if with_keys else [])
    # A trainer that is killed revokes nothing: the key is valid for the 600 s of an evaluation and an hour.
    lifetimes = [(key.expires_at - key.created_at).total_seconds() for key in made]
    assert lifetimes == pytest.approx([4200.0] * len(made), abs=60)
