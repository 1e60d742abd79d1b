"""What the operator's commands do with the store: keys, sessions, exports, each as plain JSON values.

A command prints what these functions return, as a table or as JSON, so both have the same content.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.commands.secrets_files import OWNER_MODE, write_once
from turnwise.experience import Experience
from turnwise.store import keys, queries, retention, usage
from turnwise.store.database import Connection, Database
from turnwise.store.experiences import SessionFilter
from turnwise.types import Json, utc_now


@contextlib.contextmanager
def opened(url: str, *, make_ready: bool = True) -> Iterator[Database]:
    """Open a database for one command, and bring the tables of an SQLite file up to date first.

    Raises:
        SchemaMismatch: its tables are not those of this release.
        StoreUnavailable: it cannot be reached.
    """
    database = Database(url)
    try:
        if make_ready:
            database.prepare()
        yield database
    finally:
        database.close()


def upgrade(url: str) -> None:
    """Bring the tables to this release."""
    with opened(url, make_ready=False) as database:
        database.upgrade()


def prepare(url: str) -> None:
    """Bring the tables of an SQLite file up to date; make sure that those of PostgreSQL are.

    Raises:
        SchemaMismatch: the tables are not those of this release.
        StoreUnavailable: the database cannot be reached.
    """
    with opened(url):
        pass


def create_first_key(url: str, file: Path) -> str | None:
    """Create an admin key where there is no key yet, and write it to a file; return it, None where there are keys."""
    with opened(url) as database, database.write() as conn:
        if keys.any_keys(conn):
            return None
        _, key = keys.create_key(conn, "default", keys.Role("admin"), "first admin key")
        file.unlink(missing_ok=True)  # of an earlier database, or of a start that was killed before its commit
        write_once(file, f"{key}\n", OWNER_MODE)
    return key


def has_keys(url: str) -> bool:
    """Return whether a key was ever created, revoked or not."""
    with opened(url) as database, database.read() as conn:
        return keys.any_keys(conn)


def create_key(
    url: str, *, tenant: str, role: str, name: str, expires_days: float | None = None, token_budget: int | None = None
) -> Json:
    """Create a key; only this result has it in full."""
    expires_at = None if expires_days is None else utc_now() + dt.timedelta(days=expires_days)
    with opened(url) as database, database.write() as conn:
        key_id, key = keys.create_key(
            conn, tenant, keys.Role(role), name, expires_at=expires_at, token_budget=token_budget
        )
    return {"key_id": key_id, "key": key, "tenant": tenant, "role": role, "name": name}


def list_keys(url: str, *, tenant: str | None) -> list[Json]:
    """Return all keys without their secrets, each with the tokens that budgets have counted for it."""
    with opened(url) as database, database.read() as conn:
        used = usage.used_by_key(conn, tenant)
        return [{**as_json(key), "tokens_used": used.get(key.key_id, 0)} for key in keys.list_keys(conn, tenant)]


def revoke_key(url: str, key_id: str) -> Json:
    """Revoke a key.

    Raises:
        NotFound: no such key.
    """
    with opened(url) as database, database.write() as conn:
        revoked: Json = as_json(keys.revoke_key(conn, key_id))
    return revoked


def prune(url: str, *, older_than_days: float) -> Json:
    """Delete sessions that were over so long ago and wait for no training."""
    before = utc_now() - dt.timedelta(days=older_than_days)
    with opened(url) as database:
        return _delete_all(database, lambda conn: retention.prune(conn, before))


def forget(url: str, *, tenant: str, session_id: str | None) -> Json:
    """Delete a session, or everything of a tenant; name the policy versions that were trained on it.

    Raises:
        NotFound: no such session.
    """
    with opened(url) as database:
        if session_id is None:
            return _delete_all(database, lambda conn: retention.delete_tenant(conn, tenant))
        with database.write() as conn:
            return _deleted(retention.delete_session(conn, tenant, session_id))


def _delete_all(database: Database, delete_some: Callable[[Connection], retention.Deleted]) -> Json:
    """Repeat a deletion, one short transaction each time, until nothing is left."""
    total = retention.Deleted()
    while True:
        with database.write() as conn:
            deleted = delete_some(conn)
        if not deleted.sessions:
            return _deleted(total)
        total += deleted


def _deleted(deleted: retention.Deleted) -> Json:
    return {
        "num_sessions": len(deleted.sessions),
        "num_turns": deleted.num_turns,
        "policy_versions": list(deleted.policy_versions),
    }


def backup(url: str, target: Path) -> Json:
    """Copy an SQLite database to a new file while it is in use."""
    with opened(url, make_ready=False) as database:
        database.backup(target)
    return {"backup": str(target), "num_bytes": target.stat().st_size}


def list_sessions(url: str, wanted: SessionFilter, *, limit: int) -> list[Json]:
    """Return the newest sessions."""
    with opened(url) as database, database.read() as conn:
        return [as_json(session) for session in queries.sessions(conn, wanted, limit=limit)[0]]


def experience_json(experience: Experience) -> Json:
    """Return an experience as in the API: mask and logprobs cover the tokens after the prompt."""
    after = experience.prompt_length
    shown: Json = as_json(experience)
    shown["loss_mask"], shown["logprobs"] = shown["loss_mask"][after:], shown["logprobs"][after:]
    shown["return"] = shown.pop("turn_returns")
    del shown["turn_index"]
    return shown


def as_json(value: Any) -> Any:
    """Return a record as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return value
