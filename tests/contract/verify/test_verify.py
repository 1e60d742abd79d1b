"""`turnwise verify` on a sound database and on one with each fault: every fault is named with its location."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from support.commands import invoke, verify
from support.ledger_samples import add_finished, add_session, update_record
from support.migrated import new_database
from turnwise_fake_engine import running_fake_engine

from turnwise.store import claims
from turnwise.store.database import Database
from turnwise.store.schema import policy_versions, rewards, sessions, trained_sessions, turns, updates
from turnwise.store.serving import activate_version
from turnwise.store.versions import publish_version
from turnwise.types import Json, PolicyVersion
from turnwise.version_directory import weights_digest, write_manifest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Database]:
    store = new_database(tmp_path / "turnwise.db")
    for name in ("s", "other"):
        add_session(store, name, turns=3)
    directory = tmp_path / "v000001"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    (directory / "turnwise.json").write_text(json.dumps({"version": 1, "sha256": {"model.safetensors": digest}}))
    with store.write() as connection:
        publish_version(connection, PolicyVersion(version=1, path=str(directory)))
    yield store
    store.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/turnwise.db"


def test_a_sound_database_has_no_mismatch(store, url):
    status, report = verify(url)
    assert (status, report["num_mismatches"]) == (0, 0)
    assert report["checked"] == {
        "weights files": 1,
        "sessions": 2,
        "turns": 6,
        "sampled tokens": 12,
        "digests of turns": 6,
    }


FAULTS = {
    "a prompt token is lost": ({"prompt_delta": np.array([20], np.int32).tobytes()}, "prompt_length", "is 6"),
    "a sampled token is lost": ({"token_ids": np.array([22], np.int32).tobytes()}, "logprobs", "2 logprobs of 1"),
    "a logprob is positive": ({"logprobs": np.array([-1, 0.5], np.float32).tobytes()}, "logprobs[1]", "0.5"),
    "a logprob is no number": ({"logprobs": np.array([np.nan, 0], np.float32).tobytes()}, "logprobs[0]", "nan"),
    "a token id is negative": ({"token_ids": np.array([22, -23], np.int32).tobytes()}, "token_ids", "negative"),
    "an id of the prompt is negative": (
        {"prompt_delta": np.array([2, -1], np.int32).tobytes()},
        "token_ids",
        "negative",
    ),
    "the parent is another session's": ({"parent_turn_id": "other-t1"}, "parent_turn_id", "no earlier turn"),
    "the versions run backwards": ({"policy_version_first": 2}, "policy_version_first", "2 > last"),
}


@pytest.mark.parametrize(("values", "field", "problem"), FAULTS.values(), ids=FAULTS.keys())
def test_a_changed_turn_is_named(values, field, problem, store, url):
    with store.write() as connection:
        connection.execute(sa.update(turns).where(turns.c.turn_id == "s-t2").values(**values))
    status, report = verify(url)
    assert status == 1
    first = report["mismatches"][0]
    assert first["place"] == f"session 's' turn 's-t2' {field}"
    assert problem in first["problem"]


def test_a_turn_in_which_an_older_version_was_activated_is_sound(store, url):
    """A roll back under a running call: version 2 sampled its first token and version 1 its last one."""
    with store.write() as connection:
        changed = sa.update(turns).where(turns.c.turn_id == "s-t2")
        connection.execute(changed.values(policy_version_first=2, policy_version_last=1))
    assert verify(url)[1]["mismatches"][0]["problem"] == "2 > last, 1"
    with store.write() as connection:
        activate_version(connection, 1)
    problems = verify(url)[1]["mismatches"]
    assert [each["place"] for each in problems if each["check"] == "structure"] == []


def test_a_missing_turn_is_named(store, url):
    with store.write() as connection:
        connection.execute(sa.delete(turns).where(turns.c.turn_id == "s-t3"))
    status, report = verify(url)
    assert status == 1
    assert report["mismatches"] == [
        {"check": "structure", "place": "session 's' num_turns", "problem": "3 recorded, 2 turns stored"}
    ]


def test_a_changed_weights_file_is_named(store, tmp_path, url):
    file = tmp_path / "v000001" / "model.safetensors"
    file.write_bytes(b"Weights")
    status, report = verify(url)
    assert status == 1
    assert [mismatch["place"] for mismatch in report["mismatches"]] == [str(file)]


def test_a_pruned_version_is_reported_as_not_checked(store, tmp_path, url):
    with store.write() as connection:
        publish_version(connection, PolicyVersion(version=2, path=str(tmp_path / "v000002")))
    status, report = verify(url)
    assert status == 0
    assert report["not_checked"] == {"policy versions whose files are gone": 1}


def test_a_filter_limits_the_checked_turns(store, url):
    with store.write() as connection:
        connection.execute(sa.update(sessions).where(sessions.c.session_id == "other").values(num_turns=9))
    assert verify(url, "--session-id", "s")[0] == 0
    assert verify(url, "--session-id", "other")[0] == 1
    assert verify(url, "--session-id", "unknown")[1]["checked"] == {"weights files": 1, "sessions": 0}


def test_turns_are_recomputed_under_the_version_of_the_engines_directory_or_of_one_near_it(store, tmp_path, url):
    """The turns are of version 0. The engine was started with the directory of version 1, and no proxy loaded it."""
    with running_fake_engine() as engine:
        engine.state.model_path = str(tmp_path / "v000001")
        arguments = ("--engine", engine.url, "--tolerance", "100")
        reason = "sampled under version 0, the engine serves 1"
        assert verify(url, *arguments)[1]["not_checked"] == {reason: 6}
        status, report = verify(url, *arguments, "--version-distance", "1")
    assert (status, report["not_checked"]) == (0, {})
    checked = report["checked"]
    assert (checked["turns with logprobs recomputed"], checked["of these under another version"]) == (6, 6)


def test_an_unreachable_engine_is_reported_in_one_sentence(store, url):
    result = invoke("verify", "--database", url, "--engine", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "Traceback" not in result.stderr


ADVANTAGES = {"a-t1": 0.5, "a-t2": -0.25}


@pytest.fixture
def trained(database: Database, tmp_path: Path) -> Database:
    """Sessions `a` and `b` of two turns each; update 1 trained them and made version 1, whose files are on disk."""
    for name in ("a", "b"):
        add_finished(database, name, turns=2, value=1)
    directory = tmp_path / "v000001"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    write_manifest(directory, {"version": 1})
    claimed = claims.claim(database, "trainer", max_groups=2, lease_seconds=60)
    update = update_record(1, trainer_id="trainer", num_groups=2, num_sessions=2, num_tokens=8)
    policy = PolicyVersion(version=1, path=str(directory), update_id=1, weights_digest=weights_digest(directory))
    advantages = {("default", "a"): ADVANTAGES, ("default", "b"): {"b-t1": 1.0, "b-t2": 1.0}}
    with database.write() as connection:
        claims.ack(connection, claims.Finished(claimed, update, policy, trained=advantages))
    return database


def check(database: Database, database_url: str) -> tuple[int, Json]:
    database.close()
    return verify(database_url)


def test_a_sound_ledger_has_no_mismatch(trained, database_url):
    status, report = check(trained, database_url)
    assert (status, report["mismatches"], report["not_checked"]) == (0, [], {})
    checked = report["checked"]
    assert (checked["digests of turns"], checked["digests of reward lines"]) == (4, 2)
    assert (checked["updates"], checked["weights files"]) == (1, 1)


OF_A_T1 = sa.update(turns).where(turns.c.turn_id == "a-t1")
CHANGED = {
    "a token": (OF_A_T1.values(token_ids=np.array([12, 99], np.int32).tobytes()), "session 'a' turn 'a-t1'"),
    "a logprob": (OF_A_T1.values(logprobs=np.array([-1.0, -1.5], np.float32).tobytes()), "session 'a' turn 'a-t1'"),
    "a text": (OF_A_T1.values(response=json.dumps({"content": "something else"})), "session 'a' turn 'a-t1'"),
    "a reward": (sa.update(rewards).where(rewards.c.reward_id == 1).values(value=2.0), "session 'a' reward line 1"),
    "an advantage": (
        sa.update(trained_sessions)
        .where(trained_sessions.c.advantages.contains("a-t2"))
        .values(advantages=json.dumps(ADVANTAGES | {"a-t2": 0.25})),
        "update 1 session 'a' of tenant 'default'",
    ),
    "a turn with its own digest, which the update that trained it still shows": (
        sa.update(turns).where(turns.c.turn_id == "b-t2").values(digest=b"0" * 16),
        "update 1 session 'b' of tenant 'default'",
    ),
    "a batch": (sa.update(updates).values(batch_digest="0" * 32), "update 1 batch_digest"),
    "a published digest, as if a file was replaced together with its manifest": (
        sa.update(policy_versions).values(weights_digest="0" * 64),
        "v000001/turnwise.json",
    ),
}


@pytest.mark.parametrize(("fault", "place"), CHANGED.values(), ids=CHANGED)
def test_a_changed_value_is_named(fault, place, trained, database_url):
    with trained.write() as connection:
        connection.execute(fault)
    status, report = check(trained, database_url)
    assert status == 1
    assert place in [mismatch["place"][-len(place) :] for mismatch in report["mismatches"]]


def test_turns_and_reward_lines_without_a_digest_are_named(trained, database_url):
    with trained.write() as connection:
        connection.execute(sa.update(turns).where(turns.c.turn_id == "a-t1").values(digest=None))
        connection.execute(sa.update(rewards).where(rewards.c.reward_id == 1).values(digest=None))
        connection.execute(sa.update(updates).values(batch_digest=None))
    status, report = check(trained, database_url)
    assert (status, report["not_checked"]["updates that trained nothing, or deleted turns"]) == (1, 1)
    assert [each["place"] for each in report["mismatches"] if "has no digest" in str(each)] == [
        "session 'a' turn 'a-t1'",
        "session 'a' reward line 1",
    ]


def test_an_update_with_deleted_sessions_is_reported_as_not_checked(trained, database_url):
    with trained.write() as connection:
        connection.execute(sa.delete(trained_sessions).where(trained_sessions.c.advantages.contains("a-t2")))
    status, report = check(trained, database_url)
    assert (status, report["not_checked"]["updates with deleted sessions"]) == (0, 1)
