"""API keys, and the secrets that all proxy processes share.

One decision: a key is `tw-ID-SECRET`; only a hash of the secret is stored, and since the secret is 32 random bytes a
plain SHA-256 is enough. The id in front finds the row, so the comparison is of one hash, in constant time.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import hashlib
import hmac
import secrets

import sqlalchemy as sa

from turnwise.errors import NotFound
from turnwise.store.database import from_micros, to_micros
from turnwise.store.rows import StoredRow
from turnwise.store.statements import insert_ignoring
from turnwise.store.tables import api_keys
from turnwise.store.tables import secrets as secrets_table
from turnwise.types import utc_now

_PREFIX = "tw"
_SECRET_BYTES = 32


class Role(enum.StrEnum):
    """How far a key reaches."""

    AGENT = "agent"
    """Calls the model, opens sessions, posts rewards, reads its tenant's data."""
    TRAINER = "trainer"
    """Also reads experiences and publishes policies."""
    ADMIN = "admin"
    """Everything, keys included."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API key without its secret."""

    key_id: str
    tenant: str
    role: Role
    name: str
    created_at: datetime.datetime
    revoked_at: datetime.datetime | None = None


def create_key(conn: sa.Connection, tenant: str, role: Role, name: str) -> tuple[str, str]:
    """Make a key; return its id and the whole key, which is shown this once and never again."""
    key_id = secrets.token_hex(8)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    conn.execute(
        sa.insert(api_keys).values(
            key_id=key_id,
            tenant=tenant,
            role=Role(role).value,
            name=name,
            secret_hash=_hash(secret),
            created_at=to_micros(utc_now()),
        )
    )
    return key_id, f"{_PREFIX}-{key_id}-{secret}"


def verify_key(conn: sa.Connection, presented: str) -> Key | None:
    """Return the key that was presented; None when it is malformed, unknown, wrong or revoked."""
    prefix, _, rest = presented.partition("-")
    key_id, _, secret = rest.partition("-")
    row = conn.execute(sa.select(api_keys).where(api_keys.c.key_id == key_id)).one_or_none()
    stored = b"" if row is None else row.secret_hash
    # Compared also when there is no such id, so that the time taken does not tell which ids exist.
    matches = hmac.compare_digest(_hash(secret), stored)
    if row is None or not matches or prefix != _PREFIX or row.revoked_at is not None:
        return None
    return _key(row)


def list_keys(conn: sa.Connection, tenant: str | None = None) -> list[Key]:
    """Return all keys, revoked ones included, oldest first; of one tenant if it is named."""
    found = sa.select(api_keys).order_by(api_keys.c.created_at, api_keys.c.key_id)
    if tenant is not None:
        found = found.where(api_keys.c.tenant == tenant)
    return [_key(row) for row in conn.execute(found)]


def any_keys(conn: sa.Connection) -> bool:
    """Say whether a key was ever made, revoked or not."""
    return conn.execute(sa.select(api_keys.c.key_id).limit(1)).one_or_none() is not None


def revoke_key(conn: sa.Connection, key_id: str, now: datetime.datetime | None = None) -> Key:
    """Make a key useless from now on; revoking it again changes nothing.

    Raises:
        NotFound: no such key.
    """
    conn.execute(
        sa.update(api_keys)
        .where(api_keys.c.key_id == key_id, api_keys.c.revoked_at.is_(None))
        .values(revoked_at=to_micros(now or utc_now()))
    )
    row = conn.execute(sa.select(api_keys).where(api_keys.c.key_id == key_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no API key {key_id!r}; `turnwise keys list` shows them")
    return _key(row)


def server_secret(conn: sa.Connection, name: str = "session_keys") -> bytes:
    """Return a secret that all proxy processes share; the first to ask makes it."""
    insert_ignoring(conn, secrets_table, {"name": name, "value": secrets.token_bytes(_SECRET_BYTES)})
    found = sa.select(secrets_table.c.value).where(secrets_table.c.name == name)
    return bytes(conn.execute(found).scalar_one())


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="surrogatepass")).digest()


def _key(row: StoredRow) -> Key:
    return Key(
        key_id=row.key_id,
        tenant=row.tenant,
        role=Role(row.role),
        name=row.name,
        created_at=from_micros(row.created_at),
        revoked_at=None if row.revoked_at is None else from_micros(row.revoked_at),
    )
