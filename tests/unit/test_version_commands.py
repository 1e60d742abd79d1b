"""`turnwise policies` and `turnwise updates`: served versions, updates, and versions that can still be served."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke
from support.full_disk import no_file_over
from support.ledger_samples import make_turn
from support.migrated import migrated, writing
from support.tiny_checkpoints import write_adapter

from turnwise.features import earned, policies
from turnwise.features.estimates import ESTIMATE, Logged, estimate
from turnwise.features.policies import publish_next
from turnwise.store import rewards, serving, sessions, versions
from turnwise.store.turns import append_turns
from turnwise.types import PolicyKind, PolicyVersion, Reward, Session


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with versions 0 to 2; the files of version 1 were removed."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with writing(migrated(url)) as conn:
        for version in range(3):
            path = tmp_path / f"v{version}"
            if version != 1:
                path.mkdir()
            publish_next(conn, str(path), PolicyKind.FULL, metrics={"reward_mean": version / 4})
        serving.activate_version(conn, 2)
    return url


def test_versions_are_listed_with_reward_pin_and_files(url):
    listed = json.loads(invoke("policies", "--database", url, "--json").output)
    rows = [(each["version"], each["status"], each["on_disk"], each["pinned"], each["batch_reward"]) for each in listed]
    assert rows == [
        (2, "active", True, False, 0.5),
        (1, "published", False, False, 0.25),
        (0, "published", True, False, 0.0),
    ]


def test_a_version_is_pinned_and_unpinned(url):
    assert "Version 0 is pinned" in invoke("policies", "activate", "0", "--database", url).output
    assert [each["pinned"] for each in json.loads(invoke("policies", "--database", url, "--json").output)] == [
        False,
        False,
        True,
    ]
    assert "newest version: 2" in invoke("policies", "follow", "--database", url).output
    assert not any(each["pinned"] for each in json.loads(invoke("policies", "--database", url, "--json").output))


def test_a_version_without_files_is_refused_with_a_list_of_those_with_files(url):
    result = invoke("policies", "activate", "1", "--database", url)
    assert result.exit_code == 2
    assert re.search(r"Version 1's files no longer exist .* Choose one of: 0, 2\.", result.stderr)
    assert not any(each["pinned"] for each in json.loads(invoke("policies", "--database", url, "--json").output))


def test_the_estimate_of_a_version_is_said_as_a_whole_and_by_slice(url):
    logged = [
        Logged(log_weight=0.0, reward=n % 2, cluster=n, version=1, tenant="default", slices={"label": ["golden"]})
        for n in range(120)
    ]
    with writing(url) as conn:
        versions.add_metrics(conn, 2, {ESTIMATE: estimate(logged, {"greedy": 3})})
    lines = invoke("policies", "estimate", "2", "--database", url).output.splitlines()
    assert lines[0].startswith("Version 2: mean reward +0.000 [")
    assert lines[0].endswith("; 3 turns have no known probability, and their sessions are left out.")
    assert [line.partition(":")[0] for line in lines[1:]] == ["  label golden", "  version 1"]
    assert json.loads(invoke("policies", "estimate", "2", "--json", "--database", url).output)["num_sessions"] == 120
    assert "Version 0 was not estimated" in invoke("policies", "estimate", "0", "--database", url).output


def test_an_unknown_version_is_a_usage_error(url):
    result = invoke("policies", "activate", "9", "--database", url)
    assert (result.exit_code, "no policy version 9" in result.stderr) == (2, True)


def test_before_any_training_there_are_no_updates(url):
    assert json.loads(invoke("updates", "--database", url, "--json").output) == []
    assert invoke("updates", "--database", url).output.startswith("update_id")


def test_a_named_policy_is_created_bound_to_a_key_pinned_and_followed(tmp_path):
    url = migrated(f"sqlite:///{tmp_path}/t.db")
    at = ("--database", url)
    assert (
        "is there. Make a key: turnwise keys create --policy support"
        in invoke("policies", "create", "support", *at).output
    )
    assert "exists already; nothing has changed" in invoke("policies", "create", "support", *at).output
    assert "--policy sales --tenant b\n" in invoke("policies", "create", "sales", "--tenant", "b", *at).output
    assert "`turnwise policies list`" in invoke("policies", "archive", "suport", *at).stderr
    follow = ("policies", "follow", "--policy", "support", *at)
    assert invoke(*follow).output == "No version is published yet.\n"
    with writing(url) as conn:
        policy_id = policies.find_policy(conn, "default", "support").policy_id
        for version in (1, 2):
            adapter = PolicyVersion(version=version, policy_id=policy_id, path=str(tmp_path), kind=PolicyKind.LORA)
            versions.publish_version(conn, adapter)
    assert json.loads(invoke("keys", "create", "--policy", "support", *at, "--json").output)["policy"] == "support"
    invoke("policies", "activate", "1", *at)
    listed = json.loads(invoke("policies", *at, "--json").output)
    assert [(each["policy"], each["version"], each["pinned"]) for each in listed] == [
        ("support", 2, False),
        ("support", 1, True),
    ]
    assert "newest version: 2" in invoke(*follow).output


def test_policies_are_listed_and_an_export_that_a_full_disk_stops_can_be_repeated(tmp_path):
    url = migrated(f"sqlite:///{tmp_path}/t.db")
    at = ("--database", url)
    invoke("policies", "create", "support", *at)
    adapter = write_adapter(tmp_path / "v000001")
    with writing(url) as conn:
        policy_id = policies.find_policy(conn, "default", "support").policy_id
        publish_next(conn, str(adapter), PolicyKind.LORA, metrics={}, policy_id=policy_id)
    assert invoke("policies", "list", *at).output.startswith("tenant")
    exported = tmp_path / "exported"
    assert "no served version yet" in invoke("policies", "export", "support", str(exported), *at).stderr
    (adapter / "large").write_bytes(bytes(100_000))
    with no_file_over(50_000):  # SQLite's index of its log fits
        assert invoke("policies", "export", "support@1", str(exported), *at).exit_code != 0
    assert invoke("policies", "export", "support@1", str(exported), *at).exit_code == 0, "a full disk left files"
    assert "is not empty" in invoke("policies", "export", "support@1", str(exported), *at).stderr


NUMBERS = itertools.count()


def play(conn: Any, session_id: str, version: int, reward: float, *, is_open: bool = False) -> None:
    sessions.create_session(conn, Session(session_id=session_id))
    turn = make_turn(f"t{next(NUMBERS)}", session_id=session_id, seq=0)
    append_turns(conn, [dataclasses.replace(turn, policy_version_first=version, policy_version_last=version)])
    rewards.add_rewards(conn, [Reward(session_id=session_id, value=reward)])
    if not is_open:
        sessions.end_session(conn, "default", session_id)


def test_an_earlier_version_keeps_what_it_earned_whatever_is_played_later(tmp_path, monkeypatch):
    """Nine sessions are read a version: its newest nine before the next version. The later fill no place of theirs."""
    monkeypatch.setattr(earned, "MAX_EARNED", 9)
    url = migrated(f"sqlite:///{tmp_path}/turnwise.db")
    with writing(url) as conn:
        for version in range(3):
            publish_next(conn, str(tmp_path / f"v{version}"), PolicyKind.FULL, metrics={})
            for number in range(8):
                play(conn, f"s{version}-{number}", version, version / 4)
        play(conn, "rolled-back", 0, 0.9)
        for number in range(8):
            play(conn, f"open-{number}", 2, 0.0, is_open=True)
        monkeypatch.setattr(earned, "MAX_WINDOWS", 1)
        of_two = earned.earned_by_version(conn, "default")
        monkeypatch.setattr(earned, "MAX_WINDOWS", 3)
        earned_of_all = earned.earned_by_version(conn, None)
    found = {number: (each.num_sessions, each.mean) for number, each in earned_of_all.items()}
    assert found == {0: (9, pytest.approx(0.1)), 1: (8, 0.25), 2: (8, 0.5)}
    assert of_two == earned_of_all


def test_each_version_shows_what_its_sessions_earned_beside_the_batch_that_made_it(url):
    """Eight sessions of version 2 with 0 and 1: mean 0.5, and 1.96 · 0.5345 / √8 = 0.370. One of version 0 has none."""
    with writing(url) as conn:
        for number in range(9):
            play(conn, f"s{number}", 0 if number == 8 else 2, float(number % 2))
    listed = json.loads(invoke("policies", "--database", url, "--json").output)
    shown = [(each["version"], each["earned"], each["num_sessions"], each["batch_reward"]) for each in listed]
    assert shown == [(2, "0.500 ± 0.370", 8, 0.5), (1, None, None, 0.25), (0, "0.000", 1, 0.0)]
