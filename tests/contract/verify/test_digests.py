"""Digests of stored turns, rewards, updates and weights: sound on both databases, and each changed value is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from support.commands import verify
from support.ledger_samples import add_session, finish, update_record

from turnwise.store import claims
from turnwise.store.database import Database
from turnwise.store.schema import policy_versions, rewards, trained_sessions, turns, updates
from turnwise.types import Json, PolicyVersion
from turnwise.version_directory import weights_digest, write_manifest

ADVANTAGES = {"a-t1": 0.5, "a-t2": -0.25}


@pytest.fixture
def trained(database: Database, tmp_path: Path) -> Database:
    """Sessions `a` and `b` of two turns each; update 1 trained them and made version 1, whose files are on disk."""
    for name in ("a", "b"):
        add_session(database, name, turns=2)
        finish(database, name, value=1)
    directory = tmp_path / "v000001"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    write_manifest(directory, {"version": 1})
    claimed = claims.claim(database, "trainer", max_groups=2, lease_seconds=60)
    assert claimed is not None
    update = update_record(1, trainer_id="trainer", num_groups=2, num_sessions=2, num_tokens=8)
    policy = PolicyVersion(version=1, path=str(directory), update_id=1, weights_digest=weights_digest(directory))
    advantages = {("default", "a"): ADVANTAGES, ("default", "b"): {"b-t1": 1.0, "b-t2": 1.0}}
    with database.write() as connection:
        claims.ack(connection, claimed, update, policy, trained=advantages)
    return database


def check(database: Database, database_url: str) -> tuple[int, Json]:
    database.close()
    return verify(database_url)


def test_a_sound_ledger_has_no_mismatch(trained: Database, database_url: str) -> None:
    status, report = check(trained, database_url)
    assert (status, report["mismatches"], report["not_checked"]) == (0, [], {})
    checked = report["checked"]
    assert (checked["digests of turns"], checked["digests of reward lines"]) == (4, 2)
    assert (checked["updates"], checked["weights files"]) == (1, 1)


OF_A_T1 = sa.update(turns).where(turns.c.turn_id == "a-t1")
FAULTS = {
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


@pytest.mark.parametrize(("fault", "place"), FAULTS.values(), ids=FAULTS)
def test_a_changed_value_is_named(fault: sa.Update, place: str, trained: Database, database_url: str) -> None:
    with trained.write() as connection:
        connection.execute(fault)
    status, report = check(trained, database_url)
    assert status == 1
    assert place in [mismatch["place"][-len(place) :] for mismatch in report["mismatches"]]


def test_turns_and_reward_lines_without_a_digest_are_named(trained: Database, database_url: str) -> None:
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


def test_an_update_with_deleted_sessions_is_reported_as_not_checked(trained: Database, database_url: str) -> None:
    with trained.write() as connection:
        connection.execute(sa.delete(trained_sessions).where(trained_sessions.c.advantages.contains("a-t2")))
    status, report = check(trained, database_url)
    assert (status, report["not_checked"]["updates with deleted sessions"]) == (0, 1)
