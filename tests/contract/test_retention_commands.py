"""`turnwise prune`, `forget` and `db backup`, and the proxy's setting `retention_days`."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.commands import invoke
from support.in_process import in_process_proxy
from support.migrated import new_database
from support.waiting import wait_until

from turnwise.store import keys, sessions
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import Session, Split, utc_now

TEN_DAYS = datetime.timedelta(days=10)
LONG_AGO = utc_now() - TEN_DAYS


def add_ended(database: Database, *session_ids: str, tenant: str = "default", at: datetime.datetime = LONG_AGO) -> None:
    """Add sessions for evaluation that were over long ago; no trainer waits for them."""
    with database.write() as connection:
        for session_id in session_ids:
            session = Session(
                session_id=session_id,
                tenant=tenant,
                split=Split.EVAL,
                created_at=at,
                last_active_at=at,
            )
            sessions.create_session(connection, session)
            sessions.end_session(connection, tenant, session_id)


def session_ids(database: Database) -> set[str]:
    with database.read() as connection:
        listed, _ = sessions.list_sessions(connection, SessionFilter(), limit=100)
    return {session.session_id for session in listed}


@pytest.fixture
def store(tmp_path: Path) -> Database:
    return new_database(tmp_path / "store.db")


def run(tmp_path: Path, *arguments: str) -> Any:
    done = invoke(*arguments, "--database", f"sqlite:///{tmp_path}/store.db", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_prune_deletes_sessions_over_the_given_age(store, tmp_path):
    add_ended(store, "old-1", "old-2")
    assert run(tmp_path, "prune", "--older-than-days", "11")["num_sessions"] == 0
    assert run(tmp_path, "prune", "--older-than-days", "9")["num_sessions"] == 2
    assert session_ids(store) == set()


def test_forget_deletes_a_session_or_a_tenant_with_its_keys(store, tmp_path):
    add_ended(store, "a", "b", tenant="acme")
    add_ended(store, "c", tenant="other")
    with store.write() as connection:
        keys.create_key(connection, "acme", keys.KeyRole.AGENT, "")
    lists: dict[str, list] = {
        key: []
        for key in (
            "policy_versions",
            "served_versions",
            "shaped_policies",
            "cloned_versions",
            "deleted_versions",
            "directories_left",
        )
    }
    gone = {"num_sessions": 1, "num_turns": 0, "num_policies": 0} | lists
    assert run(tmp_path, "forget", "--tenant", "acme", "--session-id", "a", "--yes") == gone
    assert session_ids(store) == {"b", "c"}
    assert run(tmp_path, "forget", "--tenant", "acme", "--yes") == gone
    assert session_ids(store) == {"c"}
    assert run(tmp_path, "keys", "list") == []


def test_forget_deletes_the_sessions_of_an_end_user(store, tmp_path):
    with store.write() as connection:
        for session_id, user_id in (("a", "kim"), ("b", "kim"), ("c", "lea"), ("d", None)):
            sessions.create_session(connection, Session(session_id=session_id, user_id=user_id))
    assert run(tmp_path, "forget", "--user-id", "kim", "--yes")["num_sessions"] == 2, "nobody set a tenant"
    assert session_ids(store) == {"c", "d"}


def test_forget_asks_and_deletes_nothing_without_an_answer_or_where_nothing_is_found(store, tmp_path):
    add_ended(store, "a", "b", tenant="acme")

    def forget(*options: str, answer: str = "") -> Result:
        command = ["forget", "--database", f"sqlite:///{tmp_path}/store.db", *options]
        return invoke(*command, input=answer)

    for answer in ("", "n\n"):
        refused = forget("--tenant", "acme", answer=answer)
        assert (refused.exit_code, "all 2 sessions and 0 keys of tenant 'acme'" in refused.output) == (2, True), (
            refused.output
        )
        assert "--yes" in refused.stderr
    for options in (
        ("--tenant", "acmee"),
        ("--tenant", "acme", "--session-id", "x"),
        ("--tenant", "acme", "--user-id", "x"),
    ):
        missing = forget(*options, "--yes")
        assert (missing.exit_code, "has no session" in missing.stderr) == (2, True)
    assert session_ids(store) == {"a", "b"}
    assert forget("--tenant", "acme", answer="y\n").exit_code == 0
    assert session_ids(store) == set()


def test_a_backup_is_a_database_of_its_own(store, tmp_path):
    add_ended(store, "a")
    made = run(tmp_path, "db", "backup", str(tmp_path / "backup.db"))
    assert made["num_bytes"] == (tmp_path / "backup.db").stat().st_size
    copy = Database(f"sqlite:///{tmp_path}/backup.db")
    copy.check_schema()
    assert session_ids(copy) == {"a"}


def test_the_proxy_deletes_sessions_over_the_age_of_its_setting(tmp_path):
    database = new_database(tmp_path / "turnwise.db")
    add_ended(database, "ten-days")
    add_ended(database, "twenty-days", at=LONG_AGO - TEN_DAYS)
    with in_process_proxy(tmp_path, retention_days=15.0) as (http, _):
        wait_until(lambda: session_ids(database) == {"ten-days"}, "the proxy deletes the older session only")
        assert http.get("/v1/sessions/twenty-days").status_code == 404
