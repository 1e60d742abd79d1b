"""`turnwise archive`: sessions leave the tables for Parquet files, are exported from there, and come back."""

import datetime
import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from pyarrow import parquet
from support.commands import invoke
from support.ledger_samples import add_finished, add_session, finish, make_turn
from support.migrated import migrated, new_database

from trainer.claims.claims import Claims
from trainer.features import Settings
from turnwise.errors import Conflict, InvalidRequest
from turnwise.exchange import archive
from turnwise.features import retention
from turnwise.features.policies import create_policy
from turnwise.store import serving, versions
from turnwise.store.database import Database
from turnwise.store.rewards import add_rewards
from turnwise.store.rows import TURNS
from turnwise.store.schema import groups, rewards, sessions, trained_sessions, turns
from turnwise.store.turns import append_turns
from turnwise.types import DEFAULT_POLICY, GroupStatus, PolicyVersion, Reward, utc_now

LATER = utc_now() + datetime.timedelta(days=1)


def fill(database: Database) -> None:
    """Store a trained group of two sessions, a session that waits for training, and an open one."""
    for session_id in ("a", "b"):
        add_finished(database, session_id, turns=3, group_id="g", group_size=2, metadata={"of": session_id}, value=0.5)
    with database.write() as conn:
        conn.execute(sa.update(groups).values(status=GroupStatus.TRAINED.value, update_id=7))
        pk = conn.execute(sa.select(sessions.c.session_pk).where(sessions.c.session_id == "a")).scalar_one()
        conn.execute(
            sa.insert(trained_sessions).values(
                session_pk=pk, update_id=7, policy_version=8, advantages='{"a-t1": 0.25}', digest=b"\x00\xff"
            )
        )
    add_finished(database, "ready")
    add_session(database, "open")


def stored(database: Database) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    with database.read() as conn:
        for table in (sessions, groups, turns, rewards, trained_sessions):
            kept = [column for column in table.c if column.name not in ("session_pk", "group_pk", "reward_id")]
            query = sa.select(*kept)
            if table not in (sessions, groups):
                query = sa.select(sessions.c.session_id, *kept).join_from(table, sessions)
            found[table.name] = sorted(map(repr, conn.execute(query)))
    return found


def test_archived_sessions_are_deleted_from_the_tables_and_restored_unchanged(database, tmp_path):
    """Sessions that are open or wait for training stay in the tables."""
    fill(database)
    before = stored(database)
    moved = archive.archive(database, tmp_path / "archive", LATER)
    assert sorted(session_id for _, session_id in moved.sessions) == ["a", "b"]
    assert moved.num_turns == 6
    left = stored(database)
    assert [len(left[name]) for name in ("sessions", "groups", "turns", "trained_sessions")] == [2, 2, 2, 0]
    assert archive.restore(database, tmp_path / "archive") == 2
    assert stored(database) == before
    assert archive.restore(database, tmp_path / "archive") == 0


def test_what_another_policy_trained_of_a_group_leaves_and_comes_back_with_it(database, tmp_path):
    """A part that waits for its trainer keeps the group. Another database has no name for the policy in an export."""
    with database.write() as conn:
        other = create_policy(conn, "default", "other")[0].policy_id
    add_session(database, "a")
    with database.write() as conn:
        append_turns(conn, [make_turn("t7", session_id="a", policy_id=other)])
    finish(database, "a")
    for part_of in (groups.c.part_of.is_(None), groups.c.part_of.is_not(None)):
        assert archive.archive(database, tmp_path, LATER).sessions == ()
        with database.write() as conn:
            conn.execute(sa.update(groups).where(part_of).values(status=GroupStatus.TRAINED.value))
    before = stored(database)
    assert len(before["groups"]) == 2
    archive.archive(database, tmp_path, LATER)
    assert stored(database)["groups"] == []
    assert archive.restore(database, tmp_path) == 1
    assert stored(database) == before
    shown = [
        json.loads(line) for line in run("export", "--format", "sessions", "--archive", str(tmp_path)).splitlines()
    ]
    assert [[turn["policy"] for turn in each["turns"]] for each in shown] == [["default", None]]


def test_an_archive_of_before_parts_images_consent_and_several_policies_is_restored(database, tmp_path):
    """So a store comes to a commit with other tables: what its rows lack stays null, and its sessions are trained."""
    fill(database)
    old = {"support": b"x\x01", "images": "[{}]", "routed_experts": b"\x93NUMPY"}
    parts = {"support": old["support"], "images": b"[{}]", "experts": old["routed_experts"]}
    with database.write() as conn:
        conn.execute(sa.update(turns).where(turns.c.turn_id == "a-t2").values(TURNS.values({"parts": parts})))
    before = stored(database)
    archive.archive(database, tmp_path, LATER)
    (batch,) = tmp_path.glob("batch-*")
    of_turns = parquet.read_table(batch / "turns.parquet")
    for name, value in old.items():
        column = [value if packed else None for packed in of_turns["parts"].to_pylist()]
        of_turns = of_turns.append_column(name, [column])
    parquet.write_table(of_turns, batch / "turns.parquet")
    columns = {"turns": ["policy_id", "parts"], "groups": ["part_of"], "sessions": ["key_id", "train", "record"]}
    for name, later in columns.items():
        file = batch / f"{name}.parquet"
        parquet.write_table(parquet.read_table(file).drop_columns(later), file)
    for name in ("media", "session_media"):
        (batch / f"{name}.parquet").unlink()
    assert archive.restore(database, tmp_path) == 2
    assert stored(database) == before


def test_a_session_is_restored_while_its_deleted_rows_wait_for_a_sweep(database, tmp_path):
    """As after a `turnwise archive` that was killed between the deletion and the sweep."""
    fill(database)
    before = stored(database)
    archive.archive(database, tmp_path, LATER)
    archive.restore(database, tmp_path)
    with database.write() as conn:
        retention.delete_session(conn, "default", "a")
    assert archive.restore(database, tmp_path) == 1
    retention.delete_all(database, lambda _: retention.Deleted())
    assert stored(database) == before


def test_two_processes_may_restore_an_archive_at_once(database, tmp_path):
    fill(database)
    before = stored(database)
    archive.archive(database, tmp_path, LATER)
    with ThreadPoolExecutor(2) as processes:
        assert sum(processes.map(archive.restore, [database] * 2, [tmp_path] * 2)) == 2
    assert stored(database) == before


def test_what_is_trained_beside_restored_sessions_of_another_database_has_other_numbers(database, tmp_path):
    """Version 8 and update 7 are those of the old database; the new one's own would otherwise be 1 and 1."""
    fill(database)
    archive.archive(database, tmp_path / "archive", LATER)
    other = new_database(tmp_path / "other.db")
    assert archive.restore(other, tmp_path / "archive") == 2
    source = Claims(other, Settings())
    source.open(PolicyVersion(version=0, path="base"), 0)
    assert (source.newest_version(), source.next_update_id()) == (8, 8)
    with other.read() as conn:
        assert serving.serving_state(conn).newest.version == 0, "version 8 is not served"
        assert [(each.version, each.status.value) for each in versions.list_versions(conn)[0]] == [
            (8, "failed"),
            (0, "published"),
        ]
    source.close()
    other.close()


def test_a_session_that_changes_while_it_is_archived_stays(database):
    fill(database)
    with database.read() as conn:
        found = retention.over_since(conn, LATER)
    with database.write() as conn:
        add_rewards(conn, [Reward(session_id="a", tenant="default", value=1.0)])
    with database.write() as conn:
        assert retention.delete_unchanged(conn, found).sessions == (("default", "b"),)


def test_a_crash_between_the_batch_and_the_deletion_loses_nothing(database, tmp_path, monkeypatch):
    """The session is in two batches then; the last one counts."""
    fill(database)

    def crash(*_: Any, read: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retention, "delete_unchanged", crash)
        with pytest.raises(KeyboardInterrupt):
            archive.archive(database, tmp_path, LATER)
    with database.write() as conn:
        add_rewards(conn, [Reward(session_id="a", tenant="default", value=1.0)])
    before = stored(database)
    archive.archive(database, tmp_path, LATER)
    assert len(list(tmp_path.glob("batch-*"))) == 2
    assert archive.restore(database, tmp_path) == 2
    assert stored(database) == before


@pytest.mark.parametrize(("age_seconds", "is_removed"), [(0, False), (7200, True)], ids=["new", "two hours old"])
def test_an_incomplete_batch_is_removed_once_no_process_can_still_write_it(
    database, tmp_path, age_seconds, *, is_removed
):
    """A process on another machine may be writing a new one."""
    fill(database)
    incomplete = tmp_path / "out" / ".writing-x"
    incomplete.mkdir(parents=True)
    (incomplete / "groups.parquet").write_bytes(b"PAR1")
    written_at = time.time() - age_seconds
    for path in (incomplete / "groups.parquet", incomplete):
        os.utime(path, (written_at, written_at))
    assert archive.archive(database, tmp_path / "out", LATER).num_turns == 6
    assert incomplete.exists() != is_removed


def test_two_processes_do_not_write_to_one_archive(database, tmp_path):
    """They lock a regular file that is open for writing, because NFS passes on no lock on a directory."""
    fill(database)
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(Conflict, match="another `turnwise archive` writes"):
        archive.archive(database, tmp_path, LATER)
    os.close(descriptor)
    assert archive.archive(database, tmp_path, LATER).num_turns == 6


def test_a_restored_group_keeps_the_row_number_that_a_replay_buffer_names(database, tmp_path):
    """If another group has the number by now, which happens where the numbers start again, it gets a new one."""
    fill(database)
    by_id = sa.select(groups.c.group_id, groups.c.group_pk)
    with database.read() as conn:
        before = dict(conn.execute(by_id).all())
    archive.archive(database, tmp_path, LATER)
    archive.restore(database, tmp_path)
    with database.read() as conn:
        assert dict(conn.execute(by_id).all()) == before
    archive.archive(database, tmp_path, LATER)
    with database.write() as conn:
        other = {"tenant": "default", "group_id": "other", "status": "open", "num_sessions": 0, "num_finished": 0}
        numbers = {"group_pk": before["g"], "policy_id": DEFAULT_POLICY, "last_active_at": 0, "fencing_token": 0}
        conn.execute(sa.insert(groups).values(**numbers, **other))
    archive.restore(database, tmp_path)
    with database.read() as conn:
        after = dict(conn.execute(by_id).all())
    assert after["g"] not in before.values()


def run(*arguments: str) -> str:
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_archive_is_exported_like_the_database(tmp_path):
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(migrated(url))
    fill(database)
    database.close()
    formats = [("--format", name, "--group-id", "g", "--database", url) for name in ("jsonl", "sessions", "openai")]
    before = [run("export", *each) for each in formats]
    report = json.loads(run("archive", f"{tmp_path}/out", "--older-than-days", "0", "--database", url, "--json"))
    assert report == {"archived_sessions": 2, "archived_turns": 6}
    assert [run("export", *each) for each in formats] == [""] * 3
    assert [run("export", *each, "--archive", f"{tmp_path}/out") for each in formats] == before
    report = json.loads(run("archive", f"{tmp_path}/out", "--restore", "--database", url, "--json"))
    assert report == {"restored_sessions": 2}
    assert [run("export", *each) for each in formats] == before


def test_a_directory_without_an_archive_is_refused(database, tmp_path):
    with pytest.raises(InvalidRequest, match="holds no archive"):
        archive.restore(database, tmp_path)
