"""API keys: shown once, stored as a hash, revocable; and the secret that proxies share."""

import pytest
import sqlalchemy as sa

from turnwise.errors import NotFound
from turnwise.features import limits, retention
from turnwise.store import keys, schema
from turnwise.store.keys import KeyRole


def test_a_key_is_verified_until_it_is_revoked(database):
    with database.write() as connection:
        key_id, key = keys.create_key(connection, "acme", KeyRole.TRAINER, "nightly")
        verified = keys.verify_key(connection, key)
        assert (verified.key_id, verified.tenant, verified.role, verified.name) == (
            key_id,
            "acme",
            KeyRole.TRAINER,
            "nightly",
        )
        with pytest.raises(NotFound):
            keys.revoke_key(connection, key_id, tenant="another")
        revoked = keys.revoke_key(connection, key_id, tenant="acme")
        assert revoked.revoked_at is not None
        assert keys.revoke_key(connection, key_id) == revoked
        assert keys.verify_key(connection, key) is None
        with pytest.raises(NotFound, match="'nobody'"):
            keys.revoke_key(connection, "nobody")


def test_a_store_that_had_a_key_is_never_open_again(database):
    with database.write() as connection:
        assert not keys.any_keys(connection)
        keys.create_key(connection, "only", KeyRole.ADMIN, "")
        retention.delete_tenant(connection, "only")
        assert keys.list_keys(connection) == []
        assert keys.any_keys(connection)


def test_only_the_whole_key_is_accepted(database):
    with database.write() as connection:
        key_id, key = keys.create_key(connection, "acme", KeyRole.AGENT, "a")
        other_id, _ = keys.create_key(connection, "acme", KeyRole.ADMIN, "b")
        secret = key.removeprefix(f"tw-{key_id}-")
        wrong = [
            "",
            "tw",
            "tw--",
            f"tw-{key_id}",
            f"tw-{key_id}-",
            key[:-1],
            f"{key}x",
            f"xx-{key_id}-{secret}",
            f"tw-{other_id}-{secret}",
            f"tw-nobody-{secret}",
            f"tw-{key_id}-\ud800",
        ]
        assert [keys.verify_key(connection, presented) for presented in wrong] == [None] * len(wrong)


def test_the_secret_is_not_in_the_database(database):
    with database.write() as connection:
        key_id, key = keys.create_key(connection, "acme", KeyRole.AGENT, "a")
        row = connection.execute(sa.select(schema.api_keys)).one()
    secret = key.removeprefix(f"tw-{key_id}-").encode()
    assert not any(secret in str(value).encode() for value in row)
    assert len(secret) == 43  # 32 bytes, six bits a character


def test_all_processes_share_one_server_secret(database):
    secrets = []
    for _ in range(2):
        with database.write() as connection:
            secrets.append(keys.server_secret(connection))
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 32


def test_a_deleted_tenant_leaves_no_usage(database):
    with database.write() as connection:
        keys.create_key(connection, "a", keys.KeyRole.AGENT, "")
        limits.add_usage(connection, {("a", "k", 1): 3, ("b", "k", 1): 4})
        retention.delete_tenant(connection, "a")
        assert (limits.used_by_key(connection, "a"), limits.used_by_key(connection, "b")) == ({}, {"k": 4})
