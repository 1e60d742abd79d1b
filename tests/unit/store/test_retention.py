"""Deletion of old sessions, of one session and of a tenant; and copies of a database in use."""

import datetime

import pytest
import sqlalchemy as sa
from support.full_disk import no_file_over
from support.ledger_samples import add_finished, add_session, finish, update_record

from turnwise.errors import NotFound, SettingsError, StoreUnavailable
from turnwise.features import copying, forks, retention
from turnwise.features.feedback import FEEDBACK
from turnwise.features.page import overview
from turnwise.features.records import count_sessions
from turnwise.store import claims, keys, rewards, schema, selection, sessions, turns
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import IMPORT, Reward, Session, Split, utc_now

HOUR = datetime.timedelta(hours=1)


def sizes(database: Database) -> dict[str, int]:
    """Return the number of rows of each table that holds sessions' data, where there are any."""
    with database.read() as connection:
        counted = {
            name: connection.execute(sa.select(sa.func.count()).select_from(schema.metadata.tables[name])).scalar_one()
            for name in ("sessions", "turns", "rewards", "groups", "trained_sessions", "api_keys", "idempotency")
        }
    return {name: count for name, count in counted.items() if count}


def sweeps(database: Database) -> int:
    """Sweep in transactions of their own until nothing is left; return how many that took."""
    number = 1
    while True:
        with database.write() as connection:
            if not retention.sweep(connection):
                return number
        number += 1


def train_all(database: Database) -> None:
    held = claims.claim(database, "t", max_groups=9, lease_seconds=60)
    update = update_record(1, policy_version=4)
    with database.write() as connection:
        trained = {(group.tenant, group.group_id): {f"{group.group_id}-t1": 1.0} for group in held.groups}
        claims.ack(connection, claims.Finished(held, update, trained=trained))


def test_old_sessions_that_no_trainer_waits_for_are_pruned(database):
    add_finished(database, "trained", turns=3)
    train_all(database)
    add_finished(database, "claimed")
    assert claims.claim(database, "t", max_groups=1, lease_seconds=60)
    for session_id, fields in (("ready", {}), ("open", {}), ("eval", {"split": Split.EVAL})):
        add_session(database, session_id, **fields)
    finish(database, "ready")
    finish(database, "eval")
    with database.write() as connection:
        assert retention.prune(connection, utc_now() - HOUR) == retention.Deleted()
    deleted = retention.delete_all(database, lambda connection: retention.prune(connection, utc_now() + HOUR))
    assert {session_id for _, session_id in deleted.sessions} == {"trained", "eval"}
    assert (deleted.num_turns, deleted.policy_versions) == (4, (4,))
    assert sizes(database) == {"sessions": 3, "turns": 3, "rewards": 2, "groups": 3}


def test_a_deletion_keeps_the_answers_of_sessions_that_share_only_a_tenant_or_an_id(database):
    for tenant, session_id in (("x", "a"), ("y", "b"), ("x", "b")):
        add_session(database, session_id, tenant=tenant, split=Split.EVAL)
    reward = Reward(session_id="b", tenant="x", value=1.0)
    with database.write() as connection:
        rewards.add_rewards(connection, [reward], idempotency_key="k")
        sessions.end_session(connection, "x", "a")
        sessions.end_session(connection, "y", "b")
        assert len(retention.prune(connection, utc_now() + HOUR).sessions) == 2
        rewards.add_rewards(connection, [reward], idempotency_key="k")
        assert selection.session_row(connection, "x", "b").num_rewards == 1


def test_an_old_group_that_stayed_incomplete_is_pruned(database):
    add_finished(database, "a", group_id="g", group_size=2)
    with database.write() as connection:
        assert retention.prune(connection, utc_now() - HOUR) == retention.Deleted()
        assert retention.prune(connection, utc_now() + HOUR).sessions == (("default", "a"),)
        assert retention.sweep(connection)
    assert sweeps(database) == 2
    assert sizes(database) == {}


def test_the_deletion_of_a_session_deletes_all_copies_that_demonstrations_have_made(database):
    """One more than a transaction deletes."""
    add_session(database, "s")
    members = [
        Session(session_id=f"copy-{number}", group_id="copies", opened_by=IMPORT)
        for number in range(retention.SESSIONS_AT_ONCE + 1)
    ]
    with database.write() as connection:
        sessions.create_sessions(connection, members)
        for member in members:
            forks.note_copy(connection, member, {"s"}, FEEDBACK)
    retention.delete_all(database, lambda connection: retention.delete_session(connection, "default", "s"))
    assert sizes(database) == {}


def test_the_deletion_of_an_end_user_leaves_that_of_the_same_name_of_another_tenant(database):
    for tenant in ("x", "y"):
        add_session(database, "s", tenant=tenant, user_id="kim")
    of_kim = SessionFilter(tenant="x", user_id="kim")
    deleted = retention.delete_all(database, lambda connection: retention.delete_sessions(connection, of_kim))
    assert deleted.sessions == (("x", "s"),)


def test_an_old_session_of_an_open_group_with_a_young_one_is_kept(database):
    """Its group is still expected to become complete."""
    add_finished(database, "old", group_id="g", group_size=3)
    with database.write() as connection:
        connection.execute(sa.update(schema.sessions).values(last_active_at=0))
    add_session(database, "young", group_id="g", group_size=3)
    with database.write() as connection:
        assert retention.prune(connection, utc_now() - HOUR) == retention.Deleted()


def test_a_deleted_session_leaves_its_group(database):
    for session_id in ("a", "b"):
        add_session(database, session_id, group_id="g", group_size=2)
    finish(database, "a")
    with database.write() as connection:
        assert retention.delete_session(connection, "default", "a").policy_versions == ()
        with pytest.raises(NotFound):
            sessions.read_session(connection, "default", "a")
        with pytest.raises(NotFound):
            retention.delete_session(connection, "default", "a")
        group = connection.execute(sa.select(schema.groups)).one()
        assert (group.num_sessions, group.num_finished, group.status) == (1, 0, "open")


def test_the_deletion_of_a_tenant_names_the_versions_that_were_trained_on_it(database):
    for tenant in ("acme", "zeta"):
        add_finished(database, "s", tenant=tenant, turns=2)
    train_all(database)
    add_session(database, "untrained", tenant="zeta")
    with database.write() as connection:
        assert retention.delete_session(connection, "zeta", "untrained").policy_versions == ()
        assert retention.delete_tenant(connection, "acme").policy_versions == (4,)


def test_the_deletion_of_a_tenant_removes_all_its_rows_and_no_others(database, monkeypatch):
    monkeypatch.setattr(retention, "SESSIONS_AT_ONCE", 2)
    for tenant in ("acme", "zeta"):
        for number in range(3):
            add_finished(database, f"s{number}", tenant=tenant, turns=2)
        with database.write() as connection:
            keys.create_key(connection, tenant, keys.KeyRole.AGENT, "")
    rounds = []

    def delete_some(connection: sa.Connection) -> retention.Deleted:
        deleted = retention.delete_tenant(connection, "acme")
        rounds.append(len(deleted.sessions))
        return deleted

    assert retention.delete_all(database, delete_some).num_turns == 6
    assert rounds == [2, 1, 0]
    assert sizes(database) == {"sessions": 3, "turns": 6, "rewards": 3, "groups": 3, "api_keys": 1}
    with database.read() as connection:
        assert overview.count_rows(connection, "zeta").num_turns == 6


def test_a_long_session_is_gone_at_once_and_swept_in_slices(database, monkeypatch):
    """Seven turns at three a transaction, then the reward with the session's row, then nothing is left.

    Its name and the keys of its requests can be used again at once.
    """
    monkeypatch.setattr(retention, "TURNS_AT_ONCE", 3)
    add_session(database, "long", turns=7, task_id="secret", user_id="kim", metadata={"name": "Kim"})
    with database.write() as connection:
        reward = Reward(session_id="long", value=1.0)
        assert rewards.add_rewards(connection, [reward], idempotency_key="k") == [7]
        deleted = retention.delete_session(connection, "default", "long")
    assert (deleted.num_turns, deleted.has_more) == (7, False)
    with database.read() as connection:
        assert sessions.list_sessions(connection, SessionFilter()) == ([], False)
        assert (overview.count_rows(connection).sessions, overview.count_rows(connection).num_turns) == ({}, 0)
        with pytest.raises(NotFound):
            turns.read_turn(connection, "default", "long-t7")
        (left,) = connection.execute(sa.select(schema.sessions)).all()
        assert not {"default", "long", "secret", "kim", '{"name":"Kim"}'} & set(map(str, left))
        assert count_sessions(connection, SessionFilter(tenant=schema.NO_TENANT)) == 0, "it would be deleted again"
    assert sizes(database) == {"sessions": 1, "turns": 7, "rewards": 1}
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id="long"))
        assert rewards.add_rewards(connection, [reward], idempotency_key="k") == [0]
    assert sweeps(database) == 5
    assert sizes(database) == {"sessions": 1, "rewards": 1, "groups": 1, "idempotency": 1}


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_backup_is_a_whole_database_while_another_writes(database, tmp_path):
    add_session(database, "s", turns=3)
    target = tmp_path / "copy.db"
    with database.write() as connection:
        connection.execute(sa.update(schema.sessions).values(task_id="uncommitted"))
        copying.back_up(database, target)
    with pytest.raises(SettingsError, match="exists"):
        copying.back_up(database, target)
    assert sorted(file.name for file in tmp_path.glob("*copy*")) == ["copy.db"]
    copy = Database(f"sqlite:///{target}")
    copy.check_schema()
    with copy.read() as connection:
        stored = sessions.read_session(connection, "default", "s")
        assert (stored.num_turns, stored.task_id) == (3, None)
        assert len(turns.read_turns(connection, "default", "s")[0]) == 3
    copy.close()


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_backup_that_a_full_disk_stops_leaves_no_file_so_that_the_same_command_can_be_repeated(database, tmp_path):
    target = tmp_path / "copy.db"
    with no_file_over(100_000), pytest.raises(StoreUnavailable, match="has space"):
        copying.back_up(database, target)
    assert list(tmp_path.glob("*copy*")) == []
    copying.back_up(database, target)
    with pytest.raises(SettingsError, match="cannot write"):
        copying.back_up(database, tmp_path / "copy.db" / "nowhere.db")
