"""API keys with the tokens that they used, and the secrets that all proxy processes share.

A key is `tw-ID-SECRET`. Only a hash of the secret is stored; the secret is at least 32 random characters, so a plain
SHA-256 is enough. The id finds the row, so one hash is compared, in constant time. Token budgets are counted from one
row for each key and UTC day, so restarts and pruning keep them; calls without a budget are counted there too.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from turnwise.errors import InvalidRequest, NotFound
from turnwise.store import extensions
from turnwise.store.policies import find_policy
from turnwise.store.rows import RowFormat, StoredRow, to_micros
from turnwise.store.schema import NO_TENANT, api_keys, policies
from turnwise.store.schema import secrets as secrets_table
from turnwise.store.statements import insert_ignoring, insert_rows
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, LOCAL_KEY_NAME, utc_now

_PREFIX = "tw"
KEY_PREFIX = f"{_PREFIX}-"
_ID_BYTES = 8
_SECRET_BYTES = 32
_FORM = re.compile(rf"{_PREFIX}-([0-9a-f]{{{2 * _ID_BYTES}}})-([A-Za-z0-9_-]{{{_SECRET_BYTES},}})")
_SESSION_KEYS = "session_keys"
_DATABASE_ID = "database_id"
_DATABASE_ID_BYTES = 6
_KEYS_EXIST = "keys_exist"
"""The secret that exists since the first key; it is never deleted, also not with the key's tenant."""
_LOCAL_KEY = "local_key"
"""The secret that exists since `turnwise up` has made a key for its directory: from then on callers without a key may
call the model alone, until another key is created and they may do nothing."""
_LOCAL_KEY_TENANT = "default"
USE_INTERVAL = datetime.timedelta(minutes=1)


class KeyRole(enum.StrEnum):
    """What a key may do."""

    AGENT = "agent"
    """May call the model, create sessions, post rewards and read its tenant's sessions."""
    TRAINER = "trainer"
    """May also read experiences and publish policies."""
    ADMIN = "admin"
    """May do everything, including the management of keys."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key without its secret."""

    key_id: str
    tenant: str
    role: KeyRole
    name: str
    created_at: datetime.datetime
    revoked_at: datetime.datetime | None = None
    expires_at: datetime.datetime | None = None
    """When it expires; None if it does not expire."""
    last_used_at: datetime.datetime | None = None
    """When it was last verified, up to `USE_INTERVAL` out of date; None before its first use."""
    token_budget: int | None = None
    """Prompt and sampled tokens that its calls may use; None for the proxy's `key_token_budget`."""
    policy_id: int = DEFAULT_POLICY
    """The policy that its new sessions sample with."""
    policy: str = DEFAULT_POLICY_NAME
    """The name of that policy."""
    train: bool = True
    """False: it is marked, and nothing of the sessions that it calls in is trained."""
    record: bool = True
    """False: nothing that is said in them is stored either."""


_KEYS = RowFormat(Key, api_keys, joined=("policy",))


def create_key(
    conn: sa.Connection,
    tenant: str,
    role: KeyRole,
    name: str,
    *,
    expires_at: datetime.datetime | None = None,
    token_budget: int | None = None,
    key: str | None = None,
    policy: str = DEFAULT_POLICY_NAME,
    locks_out: bool = True,
) -> tuple[str, str]:
    """Create a key; return its id and the whole key, which cannot be read again.

    An operator may choose the whole key, which is random otherwise. Its sessions sample with the tenant's policy of
    this name. Without `expires_at` it never expires, and without `token_budget` it has no limit. From the first key
    that `locks_out` on, callers without a key are refused.

    Raises:
        InvalidRequest: the tenant has no name, or the chosen key is not of the form `tw-ID-SECRET`, or too short.
    """
    if tenant == NO_TENANT:
        raise InvalidRequest("a tenant needs a name; give one with --tenant", param="tenant")
    whole = f"{_PREFIX}-{secrets.token_hex(_ID_BYTES)}-{secrets.token_urlsafe(_SECRET_BYTES)}" if key is None else key
    form = _FORM.fullmatch(whole)
    if form is None:
        raise InvalidRequest(
            f"an API key is `{_PREFIX}-ID-SECRET` with an id of {2 * _ID_BYTES} hexadecimal digits and a secret of at "
            f"least {_SECRET_BYTES} letters, digits, `-` and `_`; make one with "
            f"`echo {_PREFIX}-$(openssl rand -hex {_ID_BYTES})-$(openssl rand -hex {_SECRET_BYTES})`"
        )
    key_id, secret = form.groups()
    created = Key(
        key_id=key_id,
        tenant=tenant,
        role=KeyRole(role),
        name=name,
        policy_id=find_policy(conn, tenant, policy).policy_id,
        created_at=utc_now(),
        expires_at=expires_at,
        token_budget=token_budget,
    )
    insert_rows(conn, api_keys, [_KEYS.row(created, secret_hash=_hash(secret))])
    if locks_out:
        insert_ignoring(conn, secrets_table, {"name": _KEYS_EXIST, "value": b""})
    return key_id, whole


def local_key(conn: sa.Connection, given: str | None) -> str:
    """Return an admin key of the default tenant for the commands of a directory: the given one where it may be used.

    A key that this database does not know is created in it, so that one file serves the databases of a directory.
    """
    insert_ignoring(conn, secrets_table, {"name": _LOCAL_KEY, "value": b""})
    form = _FORM.fullmatch(given or "")
    if form is not None:
        known = verify_key(conn, form.group())
        if known is not None and (known.tenant, known.role) == (_LOCAL_KEY_TENANT, KeyRole.ADMIN):
            return form.group()
    chosen = form.group() if form is not None and _row(conn, form.group(1)) is None else None
    return create_key(conn, _LOCAL_KEY_TENANT, KeyRole.ADMIN, LOCAL_KEY_NAME, key=chosen, locks_out=False)[1]


def verify_key(conn: sa.Connection, presented: str) -> Key | None:
    """Return the presented key; None if it is malformed, unknown, wrong, expired or revoked."""
    prefix, _, rest = presented.partition("-")
    key_id, _, secret = rest.partition("-")
    row = _row(conn, key_id)
    stored = b"" if row is None else row.secret_hash
    # An unknown id is compared too, so that the response time does not reveal which ids exist.
    matches = hmac.compare_digest(_hash(secret), stored)
    if row is None or not matches or prefix != _PREFIX:
        return None
    return _unless_invalid(conn, row)


def valid_key(conn: sa.Connection, key_id: str) -> Key | None:
    row = _row(conn, key_id)
    return None if row is None else _unless_invalid(conn, row)


def get_key(conn: sa.Connection, key_id: str, tenant: str | None = None) -> Key:
    """Return a key, if it belongs to the given tenant."""
    row = _row(conn, key_id)
    if row is None or tenant not in (None, row.tenant):
        raise NotFound(f"there is no API key {key_id!r}; `turnwise keys list` shows them")
    return _records(conn, [row])[0]


def is_use_unrecorded(key: Key) -> bool:
    return key.last_used_at is None or utc_now() - key.last_used_at > USE_INTERVAL


def record_use(conn: sa.Connection, key_id: str) -> None:
    conn.execute(sa.update(api_keys).where(api_keys.c.key_id == key_id).values(last_used_at=to_micros(utc_now())))


def tenants(conn: sa.Connection) -> set[str]:
    """Return the tenants that have keys or policies."""
    with_keys = sa.select(api_keys.c.tenant).where(api_keys.c.revoked_at.is_(None))
    return {*conn.execute(with_keys.union(sa.select(policies.c.tenant))).scalars()} - {NO_TENANT}


def list_keys(conn: sa.Connection, tenant: str | None = None) -> list[Key]:
    found = _select_keys().order_by(api_keys.c.created_at, api_keys.c.key_id)
    if tenant is not None:
        found = found.where(api_keys.c.tenant == tenant)
    return _records(conn, conn.execute(found).all())


def any_keys(conn: sa.Connection) -> bool:
    """Return whether there was ever a key that locks out callers without one."""
    return _KEYS_EXIST in _names(conn)


def has_local_key(conn: sa.Connection) -> bool:
    return _LOCAL_KEY in _names(conn)


def _names(conn: sa.Connection) -> set[str]:
    return set(conn.execute(sa.select(secrets_table.c.name)).scalars())


def revoke_key(conn: sa.Connection, key_id: str, *, tenant: str | None = None) -> Key:
    """Revoke a key, if it belongs to the given tenant; revoking it again changes nothing."""
    get_key(conn, key_id, tenant)
    revoked = sa.update(api_keys).where(api_keys.c.key_id == key_id, api_keys.c.revoked_at.is_(None))
    conn.execute(revoked.values(revoked_at=to_micros(utc_now())))
    return get_key(conn, key_id)


def server_secret(conn: sa.Connection) -> bytes:
    """Return the secret with which all proxy processes sign session keys; the first call creates it."""
    return made_once(conn, _SESSION_KEYS, _SECRET_BYTES)


def database_id(conn: sa.Connection) -> str:
    """Return the random id that tells this database's adapters from others' on a shared engine, made once."""
    return made_once(conn, _DATABASE_ID, _DATABASE_ID_BYTES).hex()


def known_database_id(conn: sa.Connection) -> str | None:
    """Return the database's id; None before a proxy has made it."""
    value = conn.execute(sa.select(secrets_table.c.value).where(secrets_table.c.name == _DATABASE_ID)).scalar()
    return None if value is None else bytes(value).hex()


def made_once(conn: sa.Connection, name: str, num_bytes: int) -> bytes:
    """Return the database's secret of this name, which is made at the first call."""
    insert_ignoring(conn, secrets_table, {"name": name, "value": secrets.token_bytes(num_bytes)})
    return bytes(conn.execute(sa.select(secrets_table.c.value).where(secrets_table.c.name == name)).scalar_one())


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def _unless_invalid(conn: sa.Connection, row: StoredRow) -> Key | None:
    (key,) = _records(conn, [row])
    has_expired = key.expires_at is not None and key.expires_at <= utc_now()
    return None if has_expired or key.revoked_at is not None else key


def _select_keys() -> sa.Select[*tuple[Any, ...]]:
    named = policies.c.name.label("policy")
    return sa.select(api_keys, named).join(policies, policies.c.policy_id == api_keys.c.policy_id)


def _records(conn: sa.Connection, found: Sequence[StoredRow]) -> list[Key]:
    """Return rows as records, with what features know of the keys."""
    records = [_KEYS.record(row) for row in found]
    for read in extensions.of_keys:
        values = read(conn, [(key.tenant, key.key_id) for key in records]) if records else {}
        records = [dataclasses.replace(key, **values.get((key.tenant, key.key_id), {})) for key in records]
    return records


def _row(conn: sa.Connection, key_id: str) -> StoredRow | None:
    return conn.execute(_select_keys().where(api_keys.c.key_id == key_id)).one_or_none()
