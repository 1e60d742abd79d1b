"""The tokens that keys used, which token budgets are counted from."""

from __future__ import annotations

from turnwise.store import keys, retention
from turnwise.store.database import Database


def test_usage_is_summed_by_key_tenant_and_day(database: Database) -> None:
    with database.write() as connection:
        keys.add_usage(connection, {("a", "k1", 10): 3, ("a", "k2", 11): 4, ("b", "k1", 11): 100})
        keys.add_usage(connection, {("a", "k1", 10): 5, ("a", "k1", 12): 1})
        assert keys.used_by_key(connection, "a") == {"k1": 9, "k2": 4}
        assert keys.used_by_key(connection, "a", "k1") == {"k1": 9}
        assert keys.used_by_key(connection, "a", "k1", since_day=11) == {"k1": 1}
        assert keys.used_by_key(connection, "nobody") == {}
        assert keys.used_by_key(connection, "a", since_day=11) == {"k1": 1, "k2": 4}


def test_a_deleted_tenant_leaves_no_usage(database: Database) -> None:
    with database.write() as connection:
        keys.create_key(connection, "a", keys.KeyRole.AGENT, "")
        keys.add_usage(connection, {("a", "k", 1): 3, ("b", "k", 1): 4})
        retention.delete_tenant(connection, "a")
        assert (keys.used_by_key(connection, "a"), keys.used_by_key(connection, "b")) == ({}, {"k": 4})
