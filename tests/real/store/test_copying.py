"""`turnwise db copy`: a whole database in another one, of the same or the other kind."""

import pytest
import sqlalchemy as sa
from support.commands import invoke
from support.exchanged import captured
from support.ledger_samples import add_session, finish

from turnwise.errors import StoreError
from turnwise.features import copying
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
