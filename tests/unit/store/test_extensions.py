"""What the store does for features, and without any."""

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session

from turnwise.errors import InvalidRequest
from turnwise.features import EXTENSIONS, labels, retention
from turnwise.features.labels import Label
from turnwise.features.records import session_records
from turnwise.store import extensions, sessions
from turnwise.store.selection import SessionFilter


@pytest.fixture
def no_features() -> Iterator[None]:
    extensions.use(())
    yield
    extensions.use(EXTENSIONS)


def test_without_features_a_session_is_stored_listed_and_deleted(database, no_features):
    add_finished(database, "s")
    with database.write() as conn:
        (record,) = session_records(conn, SessionFilter(session_id="s"))
        assert (record.columns, len(record.turns)) == ({}, 1)
        assert len(retention.delete_session(conn, "default", "s").sessions) == 1
        assert sessions.list_sessions(conn, SessionFilter(tenant="default")) == ([], False)


def test_a_filter_of_a_feature_that_is_not_in_use_is_refused(database, no_features):
    with database.read() as conn, pytest.raises(InvalidRequest, match="'label' here: the feature is not in use"):
        sessions.list_sessions(conn, SessionFilter(label="golden"))


def test_a_column_has_a_value_for_each_row_of_each_tenant(database):
    """Sessions of two tenants share a name, and only one of the three has a label."""
    for tenant, session_id in (("a", "one"), ("b", "one"), ("a", "two")):
        add_session(database, session_id, tenant=tenant)
    with database.write() as conn:
        labels.set_label(conn, "b", "one", Label(label="golden"))
        shown = {tenant: extensions.read_columns(conn, "session", tenant, ["one", "two"]) for tenant in ("a", "b")}
    rows = [shown[tenant].add({}, name) for tenant, name in (("a", "one"), ("b", "one"), ("a", "two"))]
    assert [[label.label for label in row["labels"]] for row in rows] == [[], ["golden"], []]


def test_the_rows_of_a_features_table_go_with_their_session(database):
    add_finished(database, "s")
    with database.write() as conn:
        labels.set_label(conn, "default", "s", Label(label="golden"))
        retention.delete_session(conn, "default", "s")
        assert conn.execute(sa.select(labels.session_labels)).all() == []
