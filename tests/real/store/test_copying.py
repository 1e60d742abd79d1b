"""`turnwise db copy`: a whole database in another one, of the same or the other kind."""

import contextlib
import sqlite3

import pytest
import sqlalchemy as sa
from support.commands import invoke
from support.exchanged import captured
from support.ledger_samples import add_session, finish
from support.migrated import new_database

from turnwise.errors import StoreError
from turnwise.features import copying, policies
from turnwise.features.copies import session_copies
from turnwise.features.page import overview
from turnwise.store import keys, turns, versions
from turnwise.store.database import Database
from turnwise.store.schema import sessions
from turnwise.types import PolicyVersion


def test_a_copy_has_every_row_is_resumed_and_numbers_its_next_rows_after_them(
    empty_database_url, tmp_path, monkeypatch
):
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 2)
    source = captured(tmp_path)
    for number in range(5):
        add_session(source, f"s{number}", turns=3)
    finish(source, "s1", value=0.5)
    with source.write() as conn:
        keys.create_key(conn, "default", keys.KeyRole.ADMIN, "me")
        versions.publish_version(conn, PolicyVersion(version=0, path="/model"))
    url = source._engine.url.render_as_string(hide_password=False)
    command = ["db", "copy", "--from", url, "--to", empty_database_url]
    target = Database(empty_database_url)
    target.upgrade()
    with source.read() as conn:  # an interrupted copy
        copying._copy_table(conn, target, sessions.metadata.tables["groups"])
        copying._copy_table(conn, target, sessions.metadata.tables["api_keys"])
    for _ in range(2):
        result = invoke(*command)
        assert result.exit_code == 0, result.output
    with source.read() as conn, target.read() as other:
        assert overview.count_rows(other) == overview.count_rows(conn)
        views, copied = (turns.read_turns(each, "default", "s1")[0] for each in (conn, other))
        assert [view.turn.digest for view in copied] == [view.turn.digest for view in views]
        assert keys.list_keys(other, "default") == keys.list_keys(conn, "default")
    add_session(target, "later")
    with target.read() as conn:
        numbers = conn.execute(sa.select(sessions.c.session_pk).order_by(sessions.c.session_pk)).scalars().all()
    assert len(numbers) == len(set(numbers)) == 7
    with pytest.raises(StoreError, match="'groups' has 6 rows in the source and 7 in the target"):
        copying.copy_all(source, target, lambda *_: None)
    source.close()
    target.close()


C1C6420C = """
    ALTER TABLE turns ADD COLUMN routed_experts BLOB;
    UPDATE turns SET routed_experts = substr(parts, instr(parts, x'0a') + 1) WHERE length(parts) > 0;
    DROP INDEX ix_turns_policy; ALTER TABLE turns DROP COLUMN policy_id; ALTER TABLE turns DROP COLUMN parts;
    DROP INDEX ix_sessions_key; ALTER TABLE sessions DROP COLUMN key_id;
    DROP INDEX ix_sessions_denied; ALTER TABLE sessions DROP COLUMN train; ALTER TABLE sessions DROP COLUMN record;
    ALTER TABLE sessions DROP COLUMN explores; ALTER TABLE sessions DROP COLUMN agent;
    DROP INDEX ix_groups_name; DROP INDEX ix_groups_part; ALTER TABLE groups DROP COLUMN part_of;
    DROP TABLE consent_marks; DROP TABLE session_copies; DROP TABLE costs; DROP TABLE session_media; DROP TABLE media;
    DROP TABLE trainer_states;
"""
"""What the tables of that commit lack of this release's."""
N5F57FD44 = """
    ALTER TABLE turns ADD COLUMN routed_experts BLOB; ALTER TABLE turns ADD COLUMN images TEXT;
    ALTER TABLE turns ADD COLUMN support BLOB; ALTER TABLE turns ADD COLUMN policy BIGINT;
    UPDATE turns SET routed_experts = substr(parts, instr(parts, x'0a') + 1) WHERE length(parts) > 0;
    UPDATE turns SET policy = policy_id WHERE policy_id != 0;
    DROP INDEX ix_turns_policy; ALTER TABLE turns DROP COLUMN policy_id; ALTER TABLE turns DROP COLUMN parts;
    ALTER TABLE turns RENAME COLUMN policy TO policy_id;
"""
EXPERTS = b"\x93NUMPY, as it came"


@pytest.mark.parametrize("changes", [C1C6420C, N5F57FD44], ids=["c1c6420c", "5f57fd44"])
def test_a_database_of_a_commit_before_the_first_release_comes_over_with_everything(
    empty_database_url, tmp_path, changes
):
    file = tmp_path / "old.db"
    source = new_database(file)
    with source.write() as conn:
        policies.create_policy(conn, "default", "own")
    for number in range(4):
        own = {"policy_id": number % 2, "group_id": f"g{number % 2}", "group_size": 2}
        add_session(source, f"s{number}", turns=2, of_turns={"parts": {"experts": EXPERTS}} if number else {}, **own)
    finish(source, "s1", value=0.5)
    with source.write() as conn:
        conn.exec_driver_sql(
            "INSERT INTO feedback (session_pk, turn_id, kind, name, content, group_id, created_at) "
            "SELECT session_pk, 's0-t1', 'demonstration', 'f', '{}', 'g1', 0 FROM sessions WHERE session_id = 's0'"
        )
    with source.read() as conn:
        views = {name: repr(turns.read_turns(conn, "default", name)) for name in ("s0", "s1", "s2", "s3")}
    source.close()
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.executescript(changes)
    for _ in range(2):
        result = invoke("db", "import-unreleased", f"sqlite:///{file}", "--database", empty_database_url)
        assert result.exit_code == 0, result.output
    target = Database(empty_database_url)
    with target.read() as conn:
        assert {name: repr(turns.read_turns(conn, "default", name)) for name in views} == views
        copies = conn.execute(sa.select(session_copies.c.source_id, session_copies.c.made_by)).all()
    assert copies == ([("s0", "feedback")] * 2 if changes == C1C6420C else [])
    assert invoke("verify", "--database", empty_database_url).exit_code == 0
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("ALTER TABLE rewards ADD COLUMN former INTEGER")
    result = invoke("db", "import-unreleased", f"sqlite:///{file}", "--database", empty_database_url)
    assert "'rewards' is of no commit before 0.2 that is known: 'former' differs" in result.stderr
    target.close()
