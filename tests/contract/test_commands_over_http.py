"""Commands that read over HTTP: a URL and a key instead of the database, by flag or environment."""

import contextlib
import json
import sqlite3

import pytest
from click.testing import Result
from support.commands import invoke
from support.proxies import running_proxy
from turnwise_fake_engine import running_fake_engine

from turnwise.client import Client


def run(*arguments: str, **environment: str) -> Result:
    return invoke(*arguments, env=environment)


def lines_of(result: Result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_sessions_policies_and_exports_are_read_with_a_url_and_a_key(tmp_path, monkeypatch):
    openai = pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/turnwise.db"
    made = json.loads(run("keys", "create", "--role", "admin", "--database", url, "--json").stdout)
    with running_fake_engine() as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        with Client(proxy.url, made["key"]) as client:
            for name in ("a", "b"):
                metadata = {"shop": name, "n": 1 + (name == "b") * 10}
                session = client.create_session(
                    session_id=name, task_id=f"task-{name}", user_id=name, metadata=metadata
                )
                messages = [{"role": "user", "content": f"Hello from {name}"}]
                session.openai().chat.completions.create(model="fake", messages=messages)
                session.end(reward=0.25)
        there = ("--url", proxy.url, "--api-key", made["key"])
        variables = {"TURNWISE_URL": proxy.url, "TURNWISE_API_KEY": made["key"]}
        by_http = json.loads(run("sessions", "--json", *there).stdout)
        assert [each["session_id"] for each in by_http] == ["b", "a"]
        assert json.loads(run("sessions", "--json", **variables).stdout) == by_http
        for chosen in (("--task-id", "task-a"), ("--user-id", "a"), ("--metadata", "shop=a"), ("--metadata", "n=1")):
            for place in (there, ("--database", url)):
                filtered = json.loads(run("sessions", "--json", *chosen, *place).stdout)
                assert [each["session_id"] for each in filtered] == ["a"], chosen
        assert "KEY=VALUE" in run("sessions", "--metadata", "shop", *there).stderr
        assert "task-b" in run("sessions", **variables).stdout
        for options in (("--format", "openai"), ("--merge", "chain")):
            stored = lines_of(run("export", *options, "--database", url))
            served = lines_of(run("export", *options, **variables))
            key = lambda line: json.dumps(line["messages"] if "messages" in line else line["tokens"])  # noqa: E731
            assert sorted(map(key, served)) == sorted(map(key, stored))
        assert set(stored[0]) - set(served[0]) == {"tenant", "routed_experts"}  # of the last format, experiences
        written = run("export", "--format", "trl", "--output", str(tmp_path / "trl.jsonl"), *there)
        assert written.stderr == f"wrote 2 lines of trl to {tmp_path / 'trl.jsonl'}\n"
        assert "the newest 1; --limit shows more" in run("sessions", "--limit", "1", *there).stderr
        (document,) = lines_of(run("export", "--format", "sessions", "--session-id", "a", *there))
        (whole,) = lines_of(run("export", "--format", "sessions", "--session-id", "a", "--database", url))
        assert set(document) == set(whole)
        assert document["turns"][0]["prompt_token_ids"] == whole["turns"][0]["prompt_token_ids"]
        assert [line["value"] for line in document["rewards"]] == [0.25]
        checked = json.loads(run("verify", "--served", "--json", *there).stdout)
        assert (checked["num_mismatches"], checked["checked"]["sessions"], checked["checked"]["turns"]) == (0, 2, 2)
        assert checked["checked"]["turns with logprobs recomputed"] == 2
        assert "over HTTP give --served" in run("verify", "--engine", engine.url, *there).stderr
        created = json.loads(run("keys", "create", "--name", "mine", "--expires-days", "1", "--json", *there).stdout)
        assert created["key"].startswith("tw-")
        assert (created["tenant"], created["role"]) == ("default", "agent")
        assert "--tenant needs the database" in run("keys", "list", "--tenant", "t", *there).stderr
        revoked = json.loads(run("keys", "revoke", created["key_id"], "--json", **variables).stdout)
        assert revoked["revoked_at"] is not None
        listed = json.loads(run("keys", "list", "--json", *there).stdout)
        assert listed == json.loads(run("keys", "list", "--json", "--database", url).stdout)
        assert [each["name"] for each in listed] == ["", "mine"]
        assert json.loads(run("policies", "--json", *there).stdout) == []
        assert json.loads(run("updates", "--json", *there).stdout) == []
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key=made["key"]) as plain:
            hello = [{"role": "user", "content": "Hello"}]
            plain.chat.completions.create(model="fake", messages=hello, user="lea")
        assert len(json.loads(run("sessions", "--json", "--user-id", "lea", *there).stdout)) == 1
        with contextlib.closing(sqlite3.connect(tmp_path / "turnwise.db")) as stored_turns, stored_turns:
            stored_turns.execute("UPDATE turns SET prompt_length = prompt_length + 1")
        damaged = run("verify", *there)
        assert (damaged.exit_code, "prompt_length" in damaged.stdout) == (1, True)
        missing, wrong = (
            run("sessions", "--url", proxy.url),
            run("sessions", "--url", proxy.url, "--api-key", "tw-wrong"),
        )
    assert (missing.exit_code, "none was given" in missing.stderr) == (2, True)
    assert (wrong.exit_code, "none was given" in wrong.stderr) == (2, False)
    assert "not both" in run("sessions", "--url", "http://x", "--database", url).stderr
    assert "--tenant needs the database" in run("sessions", "--url", "http://x", "--tenant", "t").stderr


def test_the_first_key_is_asked_about_over_http_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with running_fake_engine() as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        with Client(proxy.url) as client:
            client.create_session(session_id="a")
            refused = run("keys", "create", "--url", proxy.url)
            assert (refused.exit_code, "pass --yes" in refused.stderr) == (2, True)
            assert client.keys() == []
        assert run("keys", "create", "--yes", "--url", proxy.url).exit_code == 0
