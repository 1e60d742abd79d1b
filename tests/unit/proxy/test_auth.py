"""Authentication from a presented key to a principal: the cache, its lifetime, and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import time

import pytest
import sqlalchemy as sa

from proxy import auth
from proxy.auth import Authenticator, Principal, presented_key
from turnwise.errors import Unauthorized
from turnwise.store import keys, schema
from turnwise.store.database import Database
from turnwise.types import Session, utc_now

HOUR = datetime.timedelta(hours=1)
MICROSECOND = datetime.timedelta(microseconds=1)


@pytest.fixture
def gate(database: Database) -> Authenticator:
    return Authenticator(database, b"secret")


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def who(gate: Authenticator, key: str | None) -> Principal:
    return asyncio.run(gate.authenticate({} if key is None else bearer(key)))


def new_key(database: Database, role: str = "agent", tenant: str = "t") -> tuple[str, str]:
    with database.write() as connection:
        return keys.create_key(connection, tenant, keys.KeyRole(role), "test")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({b"authorization": b"Bearer abc"}, "abc"),
        ({b"authorization": b"bearer  abc "}, "abc"),
        ({b"authorization": b"Basic abc", b"x-api-key": b"def"}, "def"),
        ({b"authorization": b"Bearer ", b"x-api-key": b" def "}, "def"),
    ],
)
def test_a_key_is_a_bearer_token_or_an_anthropic_header(headers, key):
    assert presented_key(headers) == key


def test_the_first_key_requires_authentication_and_its_revocation_does_not_lift_it(database, gate, monkeypatch):
    who(gate, None)
    key_id, key = new_key(database)
    assert who(gate, None).role == "admin"  # cached for CACHE_SECONDS
    gate.forget()
    with pytest.raises(Unauthorized, match="this proxy needs an API key"):
        who(gate, None)
    assert who(gate, key) == Principal(tenant="t", role="agent", key_id=key_id, root_key_id=key_id)
    with database.write() as connection:
        keys.revoke_key(connection, key_id)
    fresh = Authenticator(database, b"secret")
    for presented in (None, key, "tw-x-y", "EMPTY"):
        with pytest.raises(Unauthorized):
            who(fresh, presented)


def test_beside_the_key_of_up_callers_without_one_may_call_until_there_is_another_key(database, gate):
    """What the key's sessions have stays valid then, unlike that of a session of an open proxy."""
    open_session = gate.session_key(Session(session_id="open"), who(gate, None))
    with database.write() as connection:
        key = keys.local_key(connection, None)
    gate = Authenticator(database, b"secret", has_local_key=True)
    for presented in (None, "none", "tw-x-y", key[:-1] + "!"):
        keyless = who(gate, presented)
        assert keyless.role == "keyless"
        keyless.require("call")
        for action in auth.PHRASES.keys() - {"call"}:
            with pytest.raises(Unauthorized, match="without a key this proxy lets nobody"):
                keyless.require(action)
    creator = who(gate, key)
    assert (creator.role, creator.tenant) == ("admin", "default")
    session = gate.session_key(Session(session_id="own"), creator)
    assert [who(gate, each).role for each in (session, open_session)] == ["session", "session"]
    new_key(database)
    gate.forget()
    for refused in (None, "none", open_session):
        with pytest.raises(Unauthorized):
            who(gate, refused)
    assert [who(gate, each).role for each in (key, session)] == ["admin", "session"]


def test_while_the_store_is_silent_the_key_of_up_stays_what_it_was(database, gate):
    with database.write() as connection:
        key = keys.local_key(connection, None)
    gate.forget()
    assert who(gate, key).role == "admin"
    assert gate.last_known(bearer(key)).role == "admin"
    assert gate.last_known({}).role == "keyless"


def test_a_verified_key_is_cached_for_a_limited_time(database, gate):
    key_id, key = new_key(database)
    who(gate, key)
    with database.write() as connection:
        keys.revoke_key(connection, key_id)
    assert who(gate, key).key_id == key_id
    gate._verified.expire(time.monotonic() + 6)
    with pytest.raises(Unauthorized):
        who(gate, key)


def test_a_key_is_known_as_it_was_looked_up_last(database, gate):
    """For what is read while the store is silent; a key that was found to be revoked, or is unknown, is not."""
    key_id, key = new_key(database)
    headers = {b"x-api-key": key.encode()}
    assert gate.last_known(headers) is None
    who(gate, key)
    gate._verified.clear()
    assert gate.last_known(headers).key_id == key_id
    assert gate.last_known({b"x-api-key": b"tw-x-y"}) is None
    with database.write() as connection:
        keys.revoke_key(connection, key_id)
    with pytest.raises(Unauthorized):
        who(gate, key)
    assert gate.last_known(headers) is None


def test_a_proxy_that_starts_with_keys_knows_it_without_the_store(tmp_path):
    """Until a first call it took itself for open: while the store was away, it refused its host name with 403."""
    away = Database(f"sqlite:///{tmp_path}/nowhere/x.db")
    assert not asyncio.run(Authenticator(away, b"secret", has_keys=True).is_open())


def test_a_session_key_names_its_session_and_cannot_be_forged(database, gate):
    root_id, root = new_key(database)
    session, creator = Session(session_id="s:1", tenant="tenant"), who(gate, root)
    key = gate.session_key(session, creator)
    principal = who(gate, key)
    assert (principal.tenant, principal.session_id, principal.role) == ("tenant", "s:1", "session")
    assert principal.root_key_id == root_id
    assert principal.owns(session)
    assert not principal.owns(dataclasses.replace(session, created_at=session.created_at + MICROSECOND))
    assert gate.session_key(session, creator) == key
    payload, _, mac = key.partition(".")
    other = Authenticator(database, b"another secret").session_key(session, creator)
    for forged in (payload, f"{payload}.", f"{payload}.{mac[::-1]}", f"{payload}x.{mac}", other, "tws-", "tws-ü.é"):
        with pytest.raises(Unauthorized):
            asyncio.run(gate.authenticate({b"x-api-key": forged.encode()}))


def test_a_session_key_may_reward_only_with_that_permission_and_expires_at_its_time(database, gate, monkeypatch):
    session, creator = Session(session_id="s"), who(gate, new_key(database)[1])
    now = int(auth.time.time())
    key = gate.session_key(session, creator, may_reward=True, expires_at=now + 60)
    assert who(gate, key).role == "session_reward"
    assert who(gate, gate.session_key(session, creator, expires_at=now + 60)).role == "session"
    monkeypatch.setattr(auth.time, "time", lambda: now + 60)
    with pytest.raises(Unauthorized, match="session key has expired"):
        who(gate, key)


def test_session_keys_of_two_tenants_are_different_principals(database, gate):
    creator = who(gate, new_key(database)[1])
    keys_of = [gate.session_key(Session(session_id="s", tenant=tenant), creator) for tenant in ("a", "b")]
    assert who(gate, keys_of[0]).key_id != who(gate, keys_of[1]).key_id


def test_a_session_key_is_valid_while_the_key_that_made_it_is(database, gate):
    """It ends when that is revoked or expires, and that of a proxy without keys when the first key is created."""
    session = Session(session_id="s")
    of_open = gate.session_key(session, who(gate, None))
    assert who(gate, of_open).root_key_id == "open"
    with database.write() as connection:
        root_id, root = keys.create_key(connection, "t", keys.KeyRole.AGENT, "", token_budget=5)
        _, brief = keys.create_key(connection, "t", keys.KeyRole.AGENT, "", expires_at=utc_now() + HOUR)
    gate.forget()
    with pytest.raises(Unauthorized, match="while the proxy had no API keys"):
        who(gate, of_open)
    of_root, of_brief = (gate.session_key(session, who(gate, key)) for key in (root, brief))
    assert who(gate, of_root).has_budget
    with database.write() as connection:
        keys.revoke_key(connection, root_id)
        connection.execute(sa.update(schema.api_keys).values(expires_at=0))
    gate.forget()
    for key in (of_root, of_brief):
        with pytest.raises(Unauthorized, match="expired, revoked or deleted"):
            who(gate, key)


def test_an_expired_key_is_refused_and_the_last_use_of_a_key_is_stored(database, gate):
    with database.write() as connection:
        _, expired = keys.create_key(connection, "t", keys.KeyRole.AGENT, "", expires_at=utc_now())
        key_id, valid = keys.create_key(connection, "t", keys.KeyRole.AGENT, "", expires_at=utc_now() + HOUR)
        assert keys.get_key(connection, key_id).last_used_at is None
    with pytest.raises(Unauthorized, match="unknown, expired or revoked"):
        who(gate, expired)
    before = utc_now()
    assert who(gate, valid).key_id == key_id
    assert gate.used_keys == {key_id}
    with database.write() as connection:
        keys.record_use(connection, gate.used_keys.pop())
        used = keys.get_key(connection, key_id)
    gate.forget()
    who(gate, valid)
    assert not gate.used_keys
    assert used.last_used_at >= before
    assert not keys.is_use_unrecorded(used)
    assert keys.is_use_unrecorded(dataclasses.replace(used, last_used_at=before - HOUR))


@pytest.mark.parametrize("dialect", ["sqlite"])
def test_a_locked_database_delays_no_caller(database, gate):
    """The last use of the key is recorded later."""
    key_id, key = new_key(database)
    with database.write():
        who(gate, key)
    assert gate.used_keys == {key_id}
