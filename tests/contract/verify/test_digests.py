"""Digests of stored turns, rewards, updates and weights: sound on both databases, and each changed value is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from support.ledger_samples import add_session, finish, update_record

from turnwise.commands.cli import main
from turnwise.store import claims
from turnwise.store.database import Database
from turnwise.store.tables import policy_versions, rewards, trained_sessions, turns, updates
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
    """Run `turnwise verify`; return its exit status and its report."""
    database.close()
    result = CliRunner().invoke(main, ["verify", "--database", database_url, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_sound_ledger_has_no_mismatch(trained: Database, database_url: str) -> None:
    status, report = check(trained, database_url)
    assert (status, report["mismatches"], report["not_checked"]) == (0, [], {})
    checked = report["checked"]
    assert (checked["digests of turns"], checked["digests of reward lines"]) == (4, 2)
    assert (checked["updates"], checked["weights files"]) == (1, 1)


def flip_token(connection: sa.Connection) -> None:
    blob = np.array([12, 99], np.int32).tobytes()
    connection.execute(sa.update(turns).where(turns.c.turn_id == "a-t1").values(token_ids=blob))


def flip_logprob(connection: sa.Connection) -> None:
    blob = np.array([-1.0, -1.5], np.float32).tobytes()
    connection.execute(sa.update(turns).where(turns.c.turn_id == "a-t1").values(logprobs=blob))


def change_text(connection: sa.Connection) -> None:
    text = json.dumps({"role": "assistant", "content": "something else"})
    connection.execute(sa.update(turns).where(turns.c.turn_id == "a-t1").values(response=text))


def flip_reward(connection: sa.Connection) -> None:
    connection.execute(sa.update(rewards).where(rewards.c.reward_id == 1).values(value=2.0))


def change_advantage(connection: sa.Connection) -> None:
    changed = json.dumps(ADVANTAGES | {"a-t2": 0.25})
    advantages = trained_sessions.c.advantages
    connection.execute(sa.update(trained_sessions).where(advantages.contains("a-t2")).values(advantages=changed))


def replace_turn(connection: sa.Connection) -> None:
    """Change a turn together with its own digest: the update that trained it still shows the change."""
    connection.execute(sa.update(turns).where(turns.c.turn_id == "b-t2").values(digest=b"0" * 16))


def change_batch(connection: sa.Connection) -> None:
    connection.execute(sa.update(updates).values(batch_digest="0" * 32))


def change_file(connection: sa.Connection) -> None:
    directory = Path(connection.execute(sa.select(policy_versions.c.path)).scalar_one())
    (directory / "model.safetensors").write_bytes(b"Weights")


def change_published_digest(connection: sa.Connection) -> None:
    """Change the published digest: a file that is replaced together with its manifest looks the same."""
    connection.execute(sa.update(policy_versions).values(weights_digest="0" * 64))


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (flip_token, "session 'a' turn 'a-t1'"),
        (flip_logprob, "session 'a' turn 'a-t1'"),
        (change_text, "session 'a' turn 'a-t1'"),
        (flip_reward, "session 'a' reward line 1"),
        (change_advantage, "update 1 session 'a' of tenant 'default'"),
        (replace_turn, "update 1 session 'b' of tenant 'default'"),
        (change_batch, "update 1 batch_digest"),
        (change_file, "v000001/model.safetensors"),
        (change_published_digest, "v000001/turnwise.json"),
    ],
)
def test_a_changed_value_is_named(
    fault: Callable[[sa.Connection], None], place: str, trained: Database, database_url: str
) -> None:
    with trained.write() as connection:
        fault(connection)
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
